// Attention of up to 16 queries of one key head over a row's committed slots and its tree.
//
// Sums over keys go slot by slot, and a slot that is not seen adds nothing at all. The slots that a
// node sees are in the order of its path, so its numbers are those of decoding the path alone.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "tiles.hpp"

struct Row {
  int32_t slot, start, first, width;  // cache row, slots that all see, first node, nodes
  int32_t earlier;         // slots between those and the nodes that some see; no window then
  const uint8_t* visible;  // [width, earlier + width]; null for a chain, without earlier slots

  int slot_of(int node) const { return start + earlier + node - first; }
  int end() const { return start + earlier + width; }
};

struct Item {  // queries that are taken together: nodes times query heads of a group
  int32_t row, first, count;
  int32_t keys;   // slots up to the last one that is seen
  int64_t masks;  // where the masks of the slots past the row's start begin
};

struct Plan {
  std::vector<Item> items;
};

struct Head {
  const Bf16 *keys, *values, *queries;
  Bf16* out;   // in tiles
  int column;  // of the first query head in `out`
  int query_stride, out_blocks, size, groups, slots;
};

constexpr int kQueries = 16;

static inline float from_bf16(Bf16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// NaN stays NaN: of two numbers of which one is none, these give the second.
static inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.3981999507e-3f);
  for (float c : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f})
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, n);
}

// Which queries are taken together, and per item a bit mask of the queries that see each slot.
static inline Plan plan_attention(const Row* rows, int num_rows, int groups, int kv_heads,
                                  int threads, std::vector<uint16_t>& masks) {
  int64_t queries = 0;
  for (int r = 0; r < num_rows; ++r) queries += (int64_t)rows[r].width * groups;
  const int64_t share = (queries * kv_heads + 4 * threads - 1) / (4 * threads);
  const int most = static_cast<int>(share < 1 ? 1 : share > kQueries ? kQueries : share);
  Plan plan;
  masks.clear();
  for (int r = 0; r < num_rows; ++r) {
    const Row& row = rows[r];
    const int all = row.width * groups;
    for (int first = 0; first < all; first += most) {
      const int count = all - first < most ? all - first : most;
      plan.items.push_back({r, first, count, row.start, (int64_t)masks.size()});
      const int some = row.earlier + row.width;
      for (int key = 0; key < some; ++key) {
        uint16_t mask = 0;
        for (int q = 0; q < count; ++q) {
          const int node = (first + q) / groups;
          const bool sees = row.visible ? row.visible[(int64_t)node * some + key] : key <= node;
          mask |= (uint16_t)sees << q;
        }
        masks.push_back(mask);
        if (mask) plan.items.back().keys = row.start + key + 1;
      }
    }
  }
  return plan;
}

// Sums of `count` (1 to 4) queries over values, 16 * columns numbers of a head.
template <int kColumns>
static inline void weigh(const float* scores, int keys, const Bf16* values, int size, int count,
                         __m512 (&sum)[4][kColumns]) {
  for (auto& one : sum)
    for (auto& column : one) column = _mm512_setzero_ps();
  for (int k = 0; k < keys; ++k) {
    __m512 v[kColumns];
    for (int c = 0; c < kColumns; ++c) v[c] = load_bf16(values + (int64_t)k * size + 16 * c);
    for (int q = 0; q < 4; ++q) {
      if (q >= count) break;
      const __m512 p = _mm512_set1_ps(scores[(int64_t)k * kQueries + q]);
      for (int c = 0; c < kColumns; ++c) sum[q][c] = _mm512_fmadd_ps(p, v[c], sum[q][c]);
    }
  }
}

template <int kColumns>
static inline void weigh_and_store(const Head& head, const Item& item, int first_node,
                                   const float* scores, int keys, const float* totals, int column) {
  for (int q = 0; q < item.count; q += 4) {
    const int count = item.count - q < 4 ? item.count - q : 4;
    __m512 sum[4][kColumns];
    weigh<kColumns>(scores + q, keys, head.values + column, head.size, count, sum);
    for (int i = 0; i < count; ++i) {
      const int at = item.first + q + i;
      const int node = first_node + at / head.groups;
      const int from = head.column + at % head.groups * head.size + column;
      const __m512 total = _mm512_set1_ps(totals[q + i]);
      for (int c = 0; c < kColumns; ++c)
        store_bf16(head.out + in_tiles(node, from + 16 * c, head.out_blocks),
                   _mm512_div_ps(sum[i][c], total));
    }
  }
}

// scores: room for [slots padded to 16, 16] numbers.
static inline void attend_item(const Head& head, const Row& row, const Item& item,
                               const uint16_t* masks, const int64_t* positions, int window,
                               float* scores) {
  const int size = head.size, keys = item.keys;
  // Queries as a strip: [number pair][query][2].
  alignas(64) Bf16 strip[256 * kQueries];
  std::memset(strip, 0, sizeof(Bf16) * size * kQueries);
  alignas(64) int32_t low[kQueries] = {}, places[kQueries] = {};
  for (int q = 0; q < item.count; ++q) {
    const int at = item.first + q, node = at / head.groups;
    const Bf16* from = head.queries + (int64_t)node * head.query_stride + at % head.groups * size;
    for (int c = 0; c < size; c += 2) std::memcpy(strip + c * kQueries + 2 * q, from + c, 4);
    places[q] = static_cast<int32_t>(positions[node]);
    low[q] = window ? places[q] - window + 1 : 0;
  }
  for (int k = 0; k < keys; k += 16) {
    if (k + 16 <= head.slots) {
      score_keys(head.keys + (int64_t)k * size, size, strip, scores + k * 16);
    } else {  // the cache ends within these 16
      alignas(64) Bf16 rest[16 * 256] = {};
      std::memcpy(rest, head.keys + (int64_t)k * size, sizeof(Bf16) * size * (head.slots - k));
      score_keys(rest, size, strip, scores + k * 16);
    }
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt((float)size));
  const __m512i least = _mm512_load_si512(low);
  auto sees = [&](int k) -> __mmask16 {
    if (k < row.start) return window ? _mm512_cmpge_epi32_mask(_mm512_set1_epi32(k), least) : 0xffff;
    __mmask16 mask = masks[k - row.start];
    if (window) {
      const int place = static_cast<int>(positions[k - row.start]);
      mask &= _mm512_cmpge_epi32_mask(_mm512_set1_epi32(place), least);
    }
    return mask;
  };
  __m512 most = _mm512_set1_ps(-3e38f);
  for (int k = 0; k < keys; ++k)
    most = _mm512_mask_max_ps(most, sees(k), most, _mm512_load_ps(scores + (int64_t)k * 16));
  const __m512 shift = _mm512_mul_ps(most, scale);
  __m512 total = _mm512_setzero_ps();
  for (int k = 0; k < keys; ++k) {
    const __m512 s = _mm512_fmsub_ps(_mm512_load_ps(scores + (int64_t)k * 16), scale, shift);
    const __m512 p = _mm512_maskz_mov_ps(sees(k), exponential(s));
    _mm512_store_ps(scores + (int64_t)k * 16, p);
    total = _mm512_add_ps(total, p);
  }
  alignas(64) float totals[16];
  _mm512_store_ps(totals, total);
  for (int c = 0; c < size; c += 64) {
    switch (size - c < 64 ? size - c : 64) {
      case 16: weigh_and_store<1>(head, item, row.first, scores, keys, totals, c); break;
      case 32: weigh_and_store<2>(head, item, row.first, scores, keys, totals, c); break;
      case 48: weigh_and_store<3>(head, item, row.first, scores, keys, totals, c); break;
      default: weigh_and_store<4>(head, item, row.first, scores, keys, totals, c);
    }
  }
}
