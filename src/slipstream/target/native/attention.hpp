// Attention of some queries of one key head over a row's committed slots and its tree.
//
// A score adds its products in one order, sums over slots go slot by slot, and a slot that is not seen
// adds nothing at all. The slots that a node sees are in the order of its path, so its numbers are
// those of decoding the path alone.
#pragma once

#include <algorithm>
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
  int64_t masks;  // where the masks begin: [blocks of 16 slots from the row's start on, count]
};

struct Plan {
  std::vector<Item> items;
};

struct Head {
  const Bf16 *keys, *values, *queries;
  Bf16* out;   // in tiles
  int column;  // of the first query head in `out`
  int query_stride, out_blocks, size, groups, slots;

  const Bf16* query(int at) const {  // of node at / groups
    return queries + (int64_t)(at / groups) * query_stride + at % groups * size;
  }
};

constexpr int kQueries = 24;  // of an item

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

// How many queries an item takes at most, so that the busiest thread is done soonest. Slots cost an
// item about as much as two queries do, whatever it does with them.
static inline int queries_together(const Row* rows, int num_rows, int groups, int kv_heads,
                                   int threads) {
  int widest = 1;
  for (int r = 0; r < num_rows; ++r) widest = std::max(widest, rows[r].width * groups);
  int best = 0;
  int64_t least = 0;
  const int fewest = (widest + kQueries - 1) / kQueries;
  for (int splits = fewest; splits < fewest + 4; ++splits) {
    const int most = (widest + splits - 1) / splits;
    int64_t items = 0;
    for (int r = 0; r < num_rows; ++r) items += (rows[r].width * groups + most - 1) / most;
    const int64_t cost = (items * kv_heads + threads - 1) / threads * (most + 2);
    if (!best || cost < least) best = most, least = cost;
  }
  return best;
}

// Which queries are taken together, and per item bit masks of the slots that each query sees.
static inline Plan plan_attention(const Row* rows, int num_rows, int groups, int kv_heads,
                                  int threads, std::vector<uint16_t>& masks) {
  const int most = queries_together(rows, num_rows, groups, kv_heads, threads);
  Plan plan;
  masks.clear();
  for (int r = 0; r < num_rows; ++r) {
    const Row& row = rows[r];
    const int all = row.width * groups, some = row.earlier + row.width;
    const int before = row.start % 16;  // slots that all see, of the first block
    for (int first = 0; first < all; first += most) {
      const int count = all - first < most ? all - first : most;
      plan.items.push_back({r, first, count, row.start, (int64_t)masks.size()});
      masks.resize(masks.size() + (size_t)(before + some + 15) / 16 * count, 0);
      uint16_t* to = masks.data() + plan.items.back().masks;
      for (int q = 0; q < count; ++q) {
        const int node = (first + q) / groups;
        if (before) to[q] = (1 << before) - 1;
        for (int key = 0; key < some; ++key) {
          const bool sees = row.visible ? row.visible[(int64_t)node * some + key] : key <= node;
          if (!sees) continue;
          to[(before + key) / 16 * count + q] |= 1 << (before + key) % 16;
          plan.items.back().keys = std::max(plan.items.back().keys, row.start + key + 1);
        }
      }
    }
  }
  return plan;
}

// Rows of 16 numbers of 4 bytes become columns.
static inline void transpose(__m512i (&x)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int half = 0; half < 2; ++half) {
      x[i + 2 * half] = _mm512_unpacklo_epi64(t[i + half], t[i + 2 + half]);
      x[i + 2 * half + 1] = _mm512_unpackhi_epi64(t[i + half], t[i + 2 + half]);
    }
  for (int j = 0; j < 4; ++j) {
    const __m512i even = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
    const __m512i odd = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    const __m512i more_even = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    const __m512i more_odd = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(even, more_even, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
    t[12 + j] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = t[i];
}

#ifdef __AMX_BF16__

// An item's queries by 16 keys at a time: tiles give the scores of a key side by side.
class Scorer {
 public:
  Scorer(const Head& head, const Item& item) : size_(head.size), count_(item.count) {
    std::memset(strips_, 0, sizeof strips_);
    for (int q = 0; q < count_; ++q) {
      Bf16* strip = strips_[q / 16];
      for (int c = 0; c < size_; c += 2)
        std::memcpy(strip + c * 16 + q % 16 * 2, head.query(item.first + q) + c, 4);
    }
  }

  // scores [query][key] of 16 keys, of which `valid` are there.
  void score(const Bf16* keys, int valid, float* scores) const {
    alignas(64) Bf16 some[16 * 256];
    if (valid < 16) {
      std::memset(some, 0, sizeof(Bf16) * 16 * size_);
      std::memcpy(some, keys, sizeof(Bf16) * valid * size_);
      keys = some;
    }
    for (int first = 0; first < count_; first += 16) {
      alignas(64) float found[16 * 16];
      score_keys(keys, size_, strips_[first / 16], found);
      __m512i by_query[16];
      for (int k = 0; k < 16; ++k) by_query[k] = _mm512_load_si512(found + 16 * k);
      transpose(by_query);
      for (int q = first; q < std::min(count_, first + 16); ++q)
        _mm512_store_si512(scores + 16 * q, by_query[q - first]);
    }
  }

 private:
  int size_, count_;
  alignas(64) Bf16 strips_[2][16 * 256];  // [number pair][query][2]
};

#else

// An item's queries by 16 keys at a time, which are turned so that a lane is a key.
class Scorer {
 public:
  Scorer(const Head& head, const Item& item) : size_(head.size), count_(item.count) {
    for (int q = 0; q < count_; ++q) {
      const Bf16* from = head.query(item.first + q);
#ifdef USES_DOT
      std::memcpy(queries_ + q * size_, from, sizeof(Bf16) * size_);
#else
      for (int c = 0; c < size_; c += 16) _mm512_storeu_ps(queries_ + q * size_ + c, load_bf16(from + c));
#endif
    }
  }

  // scores [query][key] of 16 keys, of which `valid` are there.
  void score(const Bf16* keys, int valid, float* scores) const {
    alignas(64) Bf16 strip[16 * 256];
    for (int c = 0; c < size_; c += 32) {
      const __mmask16 inside = size_ - c < 32 ? 0xff : 0xffff;
      __m512i x[16];
      for (int k = 0; k < 16; ++k)
        x[k] = k < valid ? _mm512_maskz_loadu_epi32(inside, keys + (int64_t)k * size_ + c)
                         : _mm512_setzero_si512();
      transpose(x);
      for (int pair = 0; pair < std::min(16, (size_ - c) / 2); ++pair)
        _mm512_store_si512(strip + (c + 2 * pair) * 16, x[pair]);
    }
    for (int q = 0; q < count_;) {
      const int count = std::min(count_ - q, kTogether);
      score_some<kTogether>(count, q, strip, scores + 16 * q);
      q += count;
    }
  }

 private:
  static constexpr int kTogether = 8;

  template <int kCount>
  void score_some(int count, int first, const Bf16* strip, float* scores) const {
    if constexpr (kCount > 1)
      if (count < kCount) return score_some<kCount - 1>(count, first, strip, scores);
    __m512 sum[kCount][1];
    for (auto& query : sum) query[0] = _mm512_setzero_ps();
    const Bf16* const strips[1] = {strip};
    add_lines<kCount, 1, false>(sum, queries_ + first * size_, size_, strips, size_ / 2);
    for (int q = 0; q < kCount; ++q) _mm512_store_ps(scores + 16 * q, sum[q][0]);
  }

  int size_, count_;
  alignas(64) Number queries_[kQueries * 256];
};

#endif

// Asks for 16 slots: a row's keys and values are a stretch of memory that nothing else has read yet.
static inline void ask(const Bf16* slots, int size) {
  for (int c = 0; c < 16 * size; c += 32)
    _mm_prefetch(reinterpret_cast<const char*>(slots + c), _MM_HINT_T1);
}

constexpr int kAhead = 64;  // slots

// Sums of queries over values, 16 * columns numbers of a head, divided by the sums of their weights.
template <int kCount, int kColumns>
static inline void weigh(const Head& head, const Item& item, int first_node, const float* weights,
                         int begin, int first, int column) {
  __m512 sum[kCount][kColumns], total[kCount];
  for (int q = 0; q < kCount; ++q) {
    total[q] = _mm512_setzero_ps();
    for (auto& one : sum[q]) one = _mm512_setzero_ps();
  }
  const Bf16* values = head.values + (int64_t)begin * head.size + column;
  weights += 16 * first;
  for (int k = begin; k < item.keys; k += 16, weights += 16 * item.count) {
    if (!first) ask(values + kAhead * head.size, head.size);
    for (int i = 0; i < std::min(16, item.keys - k); ++i, values += head.size) {
      __m512 v[kColumns];
      for (int c = 0; c < kColumns; ++c) v[c] = load_bf16(values + 16 * c);
      for (int q = 0; q < kCount; ++q) {
        const __m512 p = _mm512_set1_ps(weights[16 * q + i]);
        total[q] = _mm512_add_ps(total[q], p);
        for (int c = 0; c < kColumns; ++c) sum[q][c] = _mm512_fmadd_ps(p, v[c], sum[q][c]);
      }
    }
  }
  for (int q = 0; q < kCount; ++q) {
    const int at = item.first + first + q, node = first_node + at / head.groups;
    const int from = head.column + at % head.groups * head.size + column;
    for (int c = 0; c < kColumns; ++c)
      store_bf16(head.out + in_tiles(node, from + 16 * c, head.out_blocks),
                 _mm512_div_ps(sum[q][c], total[q]));
  }
}

constexpr int kWeighed = 5;  // queries at once: their sums of 64 numbers fill the registers

template <int kCount = kWeighed>
static inline void weigh_some(int count, const Head& head, const Item& item, int first_node,
                              const float* weights, int begin, int first) {
  if constexpr (kCount > 1)
    if (count < kCount)
      return weigh_some<kCount - 1>(count, head, item, first_node, weights, begin, first);
  for (int c = 0; c < head.size; c += 64) {
    switch (std::min(64, head.size - c)) {
      case 16: weigh<kCount, 1>(head, item, first_node, weights, begin, first, c); break;
      case 32: weigh<kCount, 2>(head, item, first_node, weights, begin, first, c); break;
      case 48: weigh<kCount, 3>(head, item, first_node, weights, begin, first, c); break;
      default: weigh<kCount, 4>(head, item, first_node, weights, begin, first, c);
    }
  }
}

// scores: room for [blocks of 16 slots, item's queries, 16] numbers.
static inline void attend_item(const Head& head, const Row& row, const Item& item,
                               const uint16_t* masks, const int64_t* positions, int window,
                               float* scores) {
  const int shared = row.start / 16 * 16;  // up to here all see all, but for the window
  int low[kQueries] = {}, begin = 0;
  if (window) {
    for (int q = 0; q < item.count; ++q)
      low[q] = static_cast<int>(positions[(item.first + q) / head.groups]) - window + 1;
    begin = std::max(0, *std::min_element(low, low + item.count)) / 16 * 16;
    begin = std::min(begin, shared);
  }
  const Scorer scorer(head, item);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt((float)head.size));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  auto places_from = [&](int k) {  // of 16 slots
    if (k + 16 <= row.start) return _mm512_add_epi32(lanes, _mm512_set1_epi32(k));
    alignas(64) int32_t place[16];
    for (int i = 0; i < 16; ++i) {
      const int node = k + i - row.start;  // there are no earlier slots where there is a window
      place[i] = node < 0 ? k + i : node < row.width ? static_cast<int>(positions[node]) : 0;
    }
    return _mm512_load_si512(place);
  };
  auto each = [&](auto body) {  // body(scores of 16 slots and a query, the query, which it sees)
    float* at = scores;
    for (int k = begin; k < item.keys; k += 16) {
      const __m512i places = window ? places_from(k) : lanes;
      for (int q = 0; q < item.count; ++q, at += 16) {
        __mmask16 sees = 0xffff;
        if (k >= shared) sees = masks[(int64_t)(k - shared) / 16 * item.count + q];
        if (window) sees &= _mm512_cmpge_epi32_mask(places, _mm512_set1_epi32(low[q]));
        body(at, q, sees);
      }
    }
  };
  float* at = scores;
  for (int k = begin; k < item.keys; k += 16, at += 16 * item.count) {
    ask(head.keys + (int64_t)(k + kAhead) * head.size, head.size);
    if (k < begin + kAhead) ask(head.values + (int64_t)k * head.size, head.size);
    scorer.score(head.keys + (int64_t)k * head.size, std::min(16, head.slots - k), at);
  }
  __m512 most[kQueries];  // then what is taken off every score
  for (auto& one : most) one = _mm512_set1_ps(-3e38f);
  each([&](float* from, int q, __mmask16 sees) {
    most[q] = _mm512_mask_max_ps(most[q], sees, most[q], _mm512_load_ps(from));
  });
  for (auto& one : most)
    one = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(one)), scale);
  each([&](float* from, int q, __mmask16 sees) {
    const __m512 s = _mm512_fmsub_ps(_mm512_load_ps(from), scale, most[q]);
    _mm512_store_ps(from, _mm512_maskz_mov_ps(sees, exponential(s)));
  });
  const int groups = (item.count + kWeighed - 1) / kWeighed;
  for (int g = 0, q = 0; g < groups; ++g) {
    const int count = (item.count - q + groups - g - 1) / (groups - g);  // of nearly equal size
    weigh_some(count, head, item, row.first, scores, begin, q);
    q += count;
  }
}
