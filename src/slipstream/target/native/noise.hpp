// Gumbel noise of a position, a pure function of its key: what `sampling.gumbel_noise` says.
#pragma once

#include <immintrin.h>

#include <cstdint>

// splitmix64's finaliser.
static inline __m512i mixed(__m512i x) {
  const __m512i first = _mm512_set1_epi64((int64_t)0xBF58476D1CE4E5B9);
  const __m512i second = _mm512_set1_epi64((int64_t)0x94D049BB133111EB);
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)), first);
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)), second);
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

// Of finite numbers above 0, to about the last bit: 2 atanh((m - 1) / (m + 1)) as a series.
static inline __m512d logarithm(__m512d x) {
  const __m512d one = _mm512_set1_pd(1.0), two = _mm512_set1_pd(2.0);
  __m512d m = _mm512_getmant_pd(x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_src);
  __m512d e = _mm512_getexp_pd(x);
  const __mmask8 is_large = _mm512_cmp_pd_mask(m, _mm512_set1_pd(1.5), _CMP_GE_OQ);
  m = _mm512_mask_mul_pd(m, is_large, m, _mm512_set1_pd(0.5));  // in [0.75, 1.5)
  e = _mm512_mask_add_pd(e, is_large, e, one);
  const __m512d f = _mm512_sub_pd(m, one);
  const __m512d s = _mm512_div_pd(f, _mm512_add_pd(f, two));
  const __m512d z = _mm512_mul_pd(s, s);
  __m512d sum = _mm512_set1_pd(1.0 / 25);
  for (int odd = 23; odd >= 3; odd -= 2) sum = _mm512_fmadd_pd(sum, z, _mm512_set1_pd(1.0 / odd));
  const __m512d twice = _mm512_add_pd(s, s);
  // ln 2 in two parts, the first of which times any exponent is exact.
  const __m512d high = _mm512_set1_pd(0x1.62e42feep-1), low = _mm512_set1_pd(0x1.a39ef35793c76p-33);
  const __m512d small = _mm512_fmadd_pd(_mm512_mul_pd(twice, z), sum, _mm512_mul_pd(e, low));
  return _mm512_fmadd_pd(e, high, _mm512_add_pd(twice, small));
}

// out [count] = -log(-log(u)) of the tokens' uniform numbers.
static inline void gumbel(uint64_t key, int64_t count, float* out) {
  const uint64_t golden = 0x9E3779B97F4A7C15;
  const __m512i step = _mm512_set1_epi64((int64_t)(8 * golden));
  alignas(64) uint64_t first[8];
  for (uint64_t lane = 0; lane < 8; ++lane) first[lane] = (lane + 1) * golden + key;
  __m512i word = _mm512_load_si512(first);
  for (int64_t i = 0; i < count; i += 8, word = _mm512_add_epi64(word, step)) {
    __m512d u = _mm512_cvtepu64_pd(_mm512_srli_epi64(mixed(word), 11));
    u = _mm512_mul_pd(_mm512_add_pd(u, _mm512_set1_pd(0.5)), _mm512_set1_pd(0x1p-53));
    const __m512d zero = _mm512_setzero_pd();
    const __m512d noise = _mm512_sub_pd(zero, logarithm(_mm512_sub_pd(zero, logarithm(u))));
    const __mmask8 kept = count - i < 8 ? (__mmask8)((1u << (count - i)) - 1) : 0xff;
    _mm256_mask_storeu_ps(out + i, kept, _mm512_cvtpd_ps(noise));
  }
}
