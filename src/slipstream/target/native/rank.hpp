// The first maximum of a row of scores; the likeliest numbers, and their log-probabilities under its
// softmax.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention.hpp"

// The lowest index of the maximum; -1 where there is NaN.
static inline int64_t first_of_row(const float* scores, int64_t size) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  __m512i ids = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), at = ids;
  __mmask16 none = 0;
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 inside = size - i < 16 ? (1 << (size - i)) - 1 : 0xffff;
    const __m512 x = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), inside, scores + i);
    const __mmask16 above = _mm512_cmp_ps_mask(x, most, _CMP_GT_OQ);
    none |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    most = _mm512_mask_mov_ps(most, above, x);
    ids = _mm512_mask_mov_epi32(ids, above, at);
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  if (none) return -1;
  const __mmask16 first = _mm512_cmp_ps_mask(most, _mm512_set1_ps(_mm512_reduce_max_ps(most)), _CMP_EQ_OQ);
  return _mm512_mask_reduce_min_epi32(first, ids);
}

// best [count] and ids [count] of one row, descending, the first among equals; -inf ends a row.
static inline void rank_row(const float* scores, int64_t size, int count, float* best,
                            int64_t* ids) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  auto load = [&](int64_t i) {
    const int64_t left = size - i;
    return left >= 16 ? _mm512_loadu_ps(scores + i)
                      : _mm512_mask_loadu_ps(lowest, (__mmask16)((1u << left) - 1), scores + i);
  };
  int found = 0;
  float least = -INFINITY;  // what a number must exceed
  for (int64_t i = 0; i < size; i += 16) {
    uint32_t above = _mm512_cmp_ps_mask(load(i), _mm512_set1_ps(least), _CMP_GT_OQ);
    for (; above; above &= above - 1) {
      const int64_t id = i + __builtin_ctz(above);
      const float value = scores[id];
      if (!(value > least)) continue;
      int at = found < count ? found++ : count - 1;
      for (; at > 0 && best[at - 1] < value; --at) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
      }
      best[at] = value;
      ids[at] = id;
      if (found == count) least = best[count - 1];
    }
  }
  for (int at = found; at < count; ++at) {
    best[at] = -INFINITY;
    ids[at] = 0;
  }
  if (!found) return;
  const __m512 most = _mm512_set1_ps(best[0]);
  __m512 sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16)
    sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(load(i), most)));
  const float total = best[0] + std::log(_mm512_reduce_add_ps(sum));
  for (int at = 0; at < found; ++at) best[at] -= total;
}
