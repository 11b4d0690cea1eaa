// Products of bfloat16 tiles: 16 rows of activations by 32 inputs by 16 outputs at a time.
//
// Activations lie in tiles too: [16 rows, 32 inputs] after each other along the inputs.
// A weight is cut into strips of 16 outputs, a strip into blocks of 32 inputs. A block lies as
// [input pair][output][2], the order that both AMX tiles and AVX-512's bfloat16 dot product take.
// Every output adds its products in one fixed order, whatever the number of rows: a node's
// numbers do not depend on what else is in the pass.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

using Bf16 = uint16_t;

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) && !defined(NO_DOT)
#define USES_DOT
#endif

// The numbers that products read: bfloat16 ones where there is an instruction for them.
#if defined(__AMX_BF16__) || defined(USES_DOT)
constexpr bool kWidens = false;
using Number = Bf16;
#else
constexpr bool kWidens = true;
using Number = float;
#endif

constexpr int kBlock = 32;       // inputs of a block
constexpr int kStrip = 16;       // outputs of a strip
constexpr int kTile = kBlock * kStrip;
constexpr int kRows = 32;        // rows of activations that a product takes at once

constexpr int kPackedTile = kTile / 2 + 64;  // bytes: 4-bit numbers, a scale and a least number

struct Weight {
  const uint8_t* data;  // [strips][blocks][planes][tile]
  const float* bias;    // [strips * 16] or null
  int32_t planes;       // 0: bfloat16; 1: 4-bit numbers; 2: 8-bit ones, low and high halves
  int32_t blocks;       // even
  int32_t strips;       // even
  int32_t outputs;      // without padding
  int32_t rounds;       // 1: multiplied by activations in 8 bits; planes are not 0
};

// Where a number of a row lies among activations in tiles.
static inline int64_t in_tiles(int row, int column, int blocks) {
  return ((int64_t)(row / 16) * blocks + column / kBlock) * kTile + row % 16 * kBlock +
         column % kBlock;
}

static inline __m512 to_float(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
static inline __m512 load_bf16(const Bf16* x) {
  return to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
static inline __m256i to_bf16(__m512 v) {
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(v);
#else  // to the nearest, ties to even; what is no number stays none
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
  const __mmask16 none = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  near = _mm512_mask_mov_epi32(near, none, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
#endif
}
static inline void store_bf16(Bf16* x, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), to_bf16(v));
}
static inline __m512 half_to_float(const uint8_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// A block of 4-bit numbers q to bfloat16 numbers 128 + q, which only have to be put together.
//
// Four lines of a block lie in one vector: of each output, four even inputs, then four odd ones.
static inline void unpack(const uint8_t* from, Bf16* to) {
  const __m512i low = _mm512_set1_epi32(0x000f000f), high = _mm512_set1_epi32(0x43004300);
  constexpr int kAndOr = 0xea;  // (a & b) | c
  for (int v = 0; v < 4; ++v, from += 64, to += 4 * kBlock) {
    const __m512i q = _mm512_loadu_si512(from);
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(q, low, high, kAndOr));
    _mm512_store_si512(to + kBlock, _mm512_ternarylogic_epi32(_mm512_srli_epi32(q, 4), low, high, kAndOr));
    _mm512_store_si512(to + 2 * kBlock, _mm512_ternarylogic_epi32(_mm512_srli_epi32(q, 8), low, high, kAndOr));
    _mm512_store_si512(to + 3 * kBlock, _mm512_ternarylogic_epi32(_mm512_srli_epi32(q, 12), low, high, kAndOr));
  }
}

#ifdef __AMX_BF16__

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

static thread_local int tile_shape = -1;  // what this thread's tiles are configured for

// Tiles 0..3 hold sums [rows, 16], 4 and 5 activations [rows, width], 6 and 7 weights.
static inline void shape_tiles(int rows, int width) {
  const int shape = rows * 64 + width;
  if (tile_shape == shape) return;
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = t < 6 ? rows : width / 2;
    config.bytes[t] = t == 4 || t == 5 ? 2 * width : 64;
  }
  _tile_loadconfig(&config);
  tile_shape = shape;
}

// Two strips by up to 16 rows.
static inline void add_narrow(const Bf16* x, const Bf16* a, const Bf16* b, int blocks) {
  for (int k = 0; k < blocks; ++k, x += kTile, a += kTile, b += kTile) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
}

// Two strips by 32 rows, `y` the second 16.
static inline void add_wide(const Bf16* x, const Bf16* y, const Bf16* a, const Bf16* b, int blocks) {
  for (int k = 0; k < blocks; ++k, x += kTile, y += kTile, a += kTile, b += kTile) {
    _tile_loadd(4, x, 64);
    _tile_loadd(6, a, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, y, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// out [32, 32] = `blocks` blocks of up to 32 rows (`y` the second 16) by two strips.
static inline void multiply_tiles(int rows, const Bf16* x, const Bf16* y, const Bf16* a,
                                  const Bf16* b, int blocks, float* out) {
  shape_tiles(rows < 16 ? rows : 16, kBlock);
  _tile_zero(0);
  _tile_zero(1);
  if (rows <= 16) {
    add_narrow(x, a, b, blocks);
  } else {
    _tile_zero(2);
    _tile_zero(3);
    add_wide(x, y, a, b, blocks);
    _tile_stored(2, out + 16 * kRows, 4 * kRows);
    _tile_stored(3, out + 16 * kRows + 16, 4 * kRows);
  }
  _tile_stored(0, out, 4 * kRows);
  _tile_stored(1, out + 16, 4 * kRows);
}

// Scores [16, 16] of 16 keys (rows of `size` numbers) by 16 queries laid out as a strip.
static inline void score_keys(const Bf16* keys, int size, const Bf16* queries, float* scores) {
  const int width = size < kBlock ? size : kBlock;
  shape_tiles(16, width);
  _tile_zero(0);
  for (int c = 0; c < size; c += width) {
    _tile_loadd(4, keys + c, size * 2);
    _tile_loadd(6, queries + c * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, scores, 64);
}

#else

// `kCount` rows, `step` apart, by lines of one or two strips: sum[row][strip] += x * strip.
//
// The lines of a later block are asked for meanwhile: while rows are multiplied, the processor does
// not look far enough ahead to ask by itself. The faster the products, the earlier.
#ifdef USES_DOT

// By AVX-512's dot product of bfloat16 pairs: on AMD's processors as fast as a product of float32
// numbers, of which it takes two.
template <int kCount, int kStrips, bool kAsks = true>
static inline void add_lines(__m512 (&sum)[kCount][kStrips], const Bf16* x, int step,
                             const Bf16* const (&strips)[kStrips], int lines) {
  for (int pair = 0; pair < lines; ++pair) {
    __m512bh w[kStrips];
    for (int s = 0; s < kStrips; ++s) {
      const Bf16* at = strips[s] + pair * kBlock;
      if (kAsks) _mm_prefetch(reinterpret_cast<const char*>(at + 4 * kTile), _MM_HINT_T1);
      w[s] = (__m512bh)_mm512_load_si512(at);
    }
    for (int r = 0; r < kCount; ++r) {
      int32_t both;
      std::memcpy(&both, x + r * step + 2 * pair, sizeof both);
      const __m512bh number = (__m512bh)_mm512_set1_epi32(both);
      for (int s = 0; s < kStrips; ++s) sum[r][s] = _mm512_dpbf16_ps(sum[r][s], number, w[s]);
    }
  }
}

#else

// By float32 products of widened numbers: the dot product takes two cycles on Sapphire Rapids,
// which makes it half as fast.

// The even and the odd inputs of a line of [output][2].
static inline __m512 even(__m512i line) { return _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)); }
static inline __m512 odd(__m512i line) {
  return _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(0xffff0000)));
}

template <int kCount, int kStrips, bool kAsks = true>
static inline void add_lines(__m512 (&sum)[kCount][kStrips], const float* x, int step,
                             const Bf16* const (&strips)[kStrips], int lines) {
  for (int pair = 0; pair < lines; ++pair) {
    __m512 w[kStrips][2];
    for (int s = 0; s < kStrips; ++s) {
      const Bf16* at = strips[s] + pair * kBlock;
      if (kAsks) _mm_prefetch(reinterpret_cast<const char*>(at + kTile), _MM_HINT_T0);
      const __m512i line = _mm512_load_si512(at);
      w[s][0] = even(line);
      w[s][1] = odd(line);
    }
    for (int side = 0; side < 2; ++side)
      for (int r = 0; r < kCount; ++r) {
        const __m512 number = _mm512_set1_ps(x[r * step + 2 * pair + side]);
        for (int s = 0; s < kStrips; ++s) sum[r][s] = _mm512_fmadd_ps(number, w[s][side], sum[r][s]);
      }
  }
}

#endif

// As many rows as there are sums in registers, by one or two strips, `apart` numbers after each other.
template <int kCount, int kStrips>
static void multiply_rows(const Number* x, const Bf16* strip, int64_t apart, int blocks, float* out) {
  __m512 sum[kCount][kStrips];
  for (auto& row : sum)
    for (auto& one : row) one = _mm512_setzero_ps();
  for (int k = 0; k < blocks; ++k) {
    const Bf16* strips[kStrips];
    for (int s = 0; s < kStrips; ++s) strips[s] = strip + s * apart + k * kTile;
    add_lines<kCount, kStrips>(sum, x + k * kTile, kBlock, strips, kBlock / 2);
  }
  for (int r = 0; r < kCount; ++r)
    for (int s = 0; s < kStrips; ++s) _mm512_storeu_ps(out + r * kRows + 16 * s, sum[r][s]);
}

template <int kCount, int kStrips>
static inline void multiply_some(int count, const Number* x, const Bf16* strip, int64_t apart,
                                 int blocks, float* out) {
  if constexpr (kCount > 1)
    if (count < kCount)
      return multiply_some<kCount - 1, kStrips>(count, x, strip, apart, blocks, out);
  multiply_rows<kCount, kStrips>(x, strip, apart, blocks, out);
}

// Rows that two strips, and that one strip, are multiplied by at once. Up to 16 rows the weights
// should pass by once, at the pace of memory; the fewer the loads, the faster are the products.
#ifdef USES_DOT
constexpr int kByTwo = 8, kByOne = 16;
#else
constexpr int kByTwo = 12, kByOne = 0;
#endif

// out [32, 32] = `blocks` blocks of up to 32 rows (`y` the second 16) by two strips.
static inline void multiply_tiles(int rows, const Number* x, const Number* y, const Bf16* a,
                                  const Bf16* b, int blocks, float* out) {
  for (int first = 0; first < rows;) {
    int count = rows - first < 16 - first % 16 ? rows - first : 16 - first % 16;
    const Number* from = (first < 16 ? x : y) + first % 16 * kBlock;
    float* to = out + first * kRows;
    if constexpr (kByOne > 0) {
      if (count > kByTwo) {
        multiply_some<kByOne, 1>(count, from, a, 0, blocks, to);
        multiply_some<kByOne, 1>(count, from, b, 0, blocks, to + 16);
        first += count;
        continue;
      }
    } else if (count > kByTwo) {
      count = (count + 1) / 2;
    }
    multiply_some<kByTwo, 2>(count, from, a, b - a, blocks, to);
    first += count;
  }
}

#endif

// Activations in tiles, with the sum of every block of every row where weights are packed.
struct Activations {
  Bf16* x;
  int blocks;
  float* block_sums;  // [rows, blocks]
  float* wide;        // `x` in float32, where products are of float32 numbers
  int32_t* rounded;   // [rows, blocks, 8] four numbers each, or null; with scales [rows, blocks]
  float* scales;

  const Number* numbers() const {
    if constexpr (kWidens)
      return reinterpret_cast<const Number*>(wide);
    else
      return reinterpret_cast<const Number*>(x);
  }
};

static inline void widen(const Activations& from, int rows) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < from.blocks * kBlock; c += 16) {
      const int64_t at = in_tiles(r, c, from.blocks);
      _mm512_store_ps(from.wide + at, load_bf16(from.x + at));
    }
}

static inline void sum_blocks(const Activations& from, int rows) {
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < from.blocks; ++k) {
      const Bf16* x = from.x + in_tiles(r, k * kBlock, from.blocks);
      from.block_sums[(int64_t)r * from.blocks + k] =
          _mm512_reduce_add_ps(_mm512_add_ps(load_bf16(x), load_bf16(x + 16)));
    }
}

// Two strips of packed blocks by up to 32 rows from `first` on: every block's sums are scaled.
//
// With numbers q = scale * (128 + q) + (least - 128 * scale), the second term times a block's sum
// of activations. `strips` holds the unpacked blocks; where it holds two of each strip only, they
// are unpacked here, one block ahead of their use.
static inline void multiply_packed(const Weight& w, const uint8_t* const (&data)[2],
                                   const Activations& from, int first, int rows,
                                   Bf16* const (&strips)[2], bool is_unpacked, float* out) {
  alignas(64) float part[kRows * kRows];
  const Number* x = from.numbers() + (int64_t)first / 16 * from.blocks * kTile;
  const Number* y = x + (int64_t)from.blocks * kTile;
  const int total = from.blocks * w.planes;
  auto block = [&](int s, int k) { return strips[s] + (is_unpacked ? k : k % 2) * kTile; };
  auto ready = [&](int k) {
    if (!is_unpacked && k < total)
      for (int s = 0; s < 2; ++s) unpack(data[s] + (int64_t)k * kPackedTile, block(s, k));
  };
  std::memset(out, 0, sizeof(float) * kRows * rows);
  ready(0);
  for (int k = 0; k < total; ++k) {
    ready(k + 1);
    const int at = k / w.planes;
    multiply_tiles(rows, x + (int64_t)at * kTile, y + (int64_t)at * kTile, block(0, k), block(1, k),
                   1, part);
    for (int s = 0; s < 2; ++s) {
      const uint8_t* scales = data[s] + (int64_t)k * kPackedTile + kTile / 2;
      const __m512 scale = half_to_float(scales);
      const __m512 least = _mm512_fnmadd_ps(_mm512_set1_ps(128.0f), scale, half_to_float(scales + 32));
      const float* sums = from.block_sums + (int64_t)first * from.blocks + at;
      for (int r = 0; r < rows; ++r) {
        float* to = out + r * kRows + 16 * s;
        const __m512 rest = _mm512_fmadd_ps(_mm512_set1_ps(sums[(int64_t)r * from.blocks]), least,
                                            _mm512_loadu_ps(to));
        _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(part + r * kRows + 16 * s), scale, rest));
      }
    }
  }
}

constexpr int kFours = kBlock / 4;  // of 8-bit numbers, in a block

// Activations in 8 bits: a scale for every block of every row, as llama.cpp has them. The sum of
// a block is that of the rounded numbers. The numbers of an eight lie as `multiply_rounded` meets
// the weights: 0, 4, 1, 5, then 2, 6, 3, 7.
static inline void round_blocks(const Activations& from, int rows) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
  for (int r = 0; r < rows; ++r)
    for (int k = 0; k < from.blocks; ++k) {
      const Bf16* x = from.x + in_tiles(r, k * kBlock, from.blocks);
      const __m512 a = load_bf16(x), b = load_bf16(x + 16);
      float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
      if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) most = __builtin_nanf("");  // a maximum hides it
      const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
      const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse));
      const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
      const __m256i bytes =
          _mm256_set_m128i(_mm512_cvtsepi32_epi8(high), _mm512_cvtsepi32_epi8(low));
      const int64_t at = (int64_t)r * from.blocks + k;
      _mm256_store_si256(reinterpret_cast<__m256i*>(from.rounded + at * kFours),
                         _mm256_shuffle_epi8(bytes, order));
      from.scales[at] = most / 127.0f;
      from.block_sums[at] =
          from.scales[at] * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
}

// sum + the four products of every lane's bytes, without sign by with; both give the same.
static inline __m512i dot_bytes(__m512i sum, __m512i without, __m512i with) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(sum, without, with);
#else  // no pair of 4-bit numbers by 8-bit ones leaves 16 bits
  const __m512i pairs = _mm512_maddubs_epi16(without, with);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}

// Two strips of packed blocks by `kCount` rows of activations in 8 bits, from `first` on.
template <int kCount>
static void multiply_rounded(const Weight& w, const uint8_t* const (&data)[2],
                             const Activations& from, int first, float* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512 total[kCount][2];
  for (auto& row : total) row[0] = row[1] = _mm512_setzero_ps();
  const uint8_t* tile[2] = {data[0], data[1]};
  const int64_t begin = (int64_t)first * from.blocks;
  for (int k = 0; k < w.blocks; ++k) {
    const int32_t* x = from.rounded + (begin + k) * kFours;
    const float *scales = from.scales + begin + k, *sums = from.block_sums + begin + k;
    for (int plane = 0; plane < w.planes; ++plane) {
      __m512i sum[kCount][2];
      for (auto& row : sum) row[0] = row[1] = _mm512_setzero_si512();
      for (int v = 0; v < 4; ++v) {
        __m512i low[2], high[2];
        for (int s = 0; s < 2; ++s) {
          const uint8_t* line = tile[s] + 64 * v;
          const __m512i q = _mm512_load_si512(line);
          low[s] = _mm512_and_si512(q, nibble);
          high[s] = _mm512_and_si512(_mm512_srli_epi16(q, 4), nibble);
        }
        for (int r = 0; r < kCount; ++r) {
          const int32_t* eight = x + (int64_t)r * from.blocks * kFours + 2 * v;
          const __m512i one = _mm512_set1_epi32(eight[0]), other = _mm512_set1_epi32(eight[1]);
          for (int s = 0; s < 2; ++s)
            sum[r][s] = dot_bytes(dot_bytes(sum[r][s], low[s], one), high[s], other);
        }
      }
      for (int s = 0; s < 2; ++s) {
        const __m512 scale = half_to_float(tile[s] + kTile / 2);
        const __m512 least = half_to_float(tile[s] + kTile / 2 + 32);
        for (int r = 0; r < kCount; ++r) {
          const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(scales[r * from.blocks]));
          const __m512 rest =
              _mm512_fmadd_ps(least, _mm512_set1_ps(sums[r * from.blocks]), total[r][s]);
          total[r][s] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][s]), both, rest);
        }
        tile[s] += kPackedTile;
      }
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int s = 0; s < 2; ++s) _mm512_storeu_ps(out + r * kRows + 16 * s, total[r][s]);
}

constexpr int kRoundedAtOnce = 6;

template <int kCount = kRoundedAtOnce>
static inline void multiply_rounded_rows(int count, const Weight& w,
                                         const uint8_t* const (&data)[2], const Activations& from,
                                         int first, float* out) {
  if constexpr (kCount > 1)
    if (count < kCount)
      return multiply_rounded_rows<kCount - 1>(count, w, data, from, first, out);
  multiply_rounded<kCount>(w, data, from, first, out);
}

// Two neighbouring strips of a weight by any number of rows.
//
// `each(first, rows)` is called for every group of up to 32 rows once `out` [32, 32] holds their
// sums. `room` takes two unpacked strips.
template <class Each>
static void multiply(const Weight& w, int pair, const Activations& from, int total, Bf16* room,
                     float* out, Each each) {
  const int64_t bytes = w.planes ? (int64_t)w.planes * kPackedTile : 2 * kTile;
  const uint8_t* data[2];
  for (int s = 0; s < 2; ++s) data[s] = w.data + (2 * pair + s) * w.blocks * bytes;
  Bf16* strips[2] = {room, room + 2 * kTile};
  const bool is_unpacked = w.planes && !w.rounds && total > kRows;
  if (is_unpacked) {
    const int count = w.blocks * w.planes;
    strips[1] = room + (int64_t)count * kTile;
    for (int s = 0; s < 2; ++s)
      for (int k = 0; k < count; ++k)
        unpack(data[s] + (int64_t)k * kPackedTile, strips[s] + (int64_t)k * kTile);
  }
  for (int first = 0; first < total; first += kRows) {
    const int rows = total - first < kRows ? total - first : kRows;
    if (w.rounds) {
      const int groups = (rows + kRoundedAtOnce - 1) / kRoundedAtOnce;
      for (int g = 0, r = 0; g < groups; ++g) {
        const int count = (rows - r + groups - g - 1) / (groups - g);  // of nearly equal size
        multiply_rounded_rows(count, w, data, from, first + r, out + r * kRows);
        r += count;
      }
    } else if (w.planes) {
      multiply_packed(w, data, from, first, rows, strips, is_unpacked, out);
    } else {
      const Number* x = from.numbers() + (int64_t)first / 16 * w.blocks * kTile;
      multiply_tiles(rows, x, x + (int64_t)w.blocks * kTile, reinterpret_cast<const Bf16*>(data[0]),
                     reinterpret_cast<const Bf16*>(data[1]), w.blocks, out);
    }
    each(first, rows);
  }
}
