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

constexpr int kBlock = 32;       // inputs of a block
constexpr int kStrip = 16;       // outputs of a strip
constexpr int kTile = kBlock * kStrip;
constexpr int kRows = 32;        // rows of activations that a product takes at once
constexpr int kDecoded = 8;      // blocks that are decoded ahead of a narrow product

enum Format : int { kBf16 = 0, kInt8 = 1, kInt4 = 2 };
constexpr int kTileBytes[] = {kTile * 2, kTile + 32, kTile / 2 + 64};

struct Weight {
  const uint8_t* data;  // [strips][blocks][tile]
  const float* bias;    // [strips * 16] or null
  int32_t format;
  int32_t blocks;       // even
  int32_t strips;       // even
  int32_t outputs;      // without padding
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
static inline void store_bf16(Bf16* x, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), (__m256i)_mm512_cvtneps_pbh(v));
}
static inline __m512 half_to_float(const uint8_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Two vectors of 16 outputs, for an even and an odd input, as one line of a block.
static inline void store_pairs(Bf16* line, __m512 even, __m512 odd) {
  alignas(64) static const uint16_t order[32] = {
      0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_store_si512(line, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

// Blocks of 8-bit numbers with a float16 scale per output, or of 4-bit numbers with a scale and a
// minimum, to bfloat16 blocks. Scale times number is exact in float32, so the result is the
// rounded float32 value of the quantised weight.
static inline void decode(const uint8_t* from, int format, int blocks, Bf16* to) {
  for (int b = 0; b < blocks; ++b, from += kTileBytes[format], to += kTile) {
    if (format == kInt8) {
      const __m512 scale = half_to_float(from + kTile);
      for (int pair = 0; pair < 16; ++pair) {
        const __m128i* q = reinterpret_cast<const __m128i*>(from + pair * 32);
        const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q)));
        const __m512 odd = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(q + 1)));
        store_pairs(to + pair * 32, _mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale));
      }
    } else {
      const __m512 scale = half_to_float(from + kTile / 2);
      const __m512 least = half_to_float(from + kTile / 2 + 32);
      const __m512i low = _mm512_set1_epi32(15);
      for (int pair = 0; pair < 16; ++pair) {
        const __m512i q = _mm512_cvtepu8_epi32(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + pair * 16)));
        const __m512 even = _mm512_cvtepi32_ps(_mm512_and_si512(q, low));
        const __m512 odd = _mm512_cvtepi32_ps(_mm512_srli_epi32(q, 4));
        store_pairs(to + pair * 32, _mm512_fmadd_ps(even, scale, least),
                    _mm512_fmadd_ps(odd, scale, least));
      }
    }
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

static inline void begin_sums(int rows) {
  shape_tiles(rows < 16 ? rows : 16, kBlock);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

static inline void add_sums(int rows, const Bf16* x, const Bf16* y, const Bf16* a, const Bf16* b,
                            int blocks, float*) {
  if (rows <= 16) {
    add_narrow(x, a, b, blocks);
  } else {
    add_wide(x, y, a, b, blocks);
  }
}

static inline void end_sums(int rows, float* out) {
  _tile_stored(0, out, 4 * kRows);
  _tile_stored(1, out + 16, 4 * kRows);
  if (rows <= 16) return;
  _tile_stored(2, out + 16 * kRows, 4 * kRows);
  _tile_stored(3, out + 16 * kRows + 16, 4 * kRows);
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

static thread_local bool started = false;  // whether `out` holds sums already

static inline __m512 dot_pairs(__m512 sum, const Bf16* line, const Bf16* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(line), (__m512bh)_mm512_set1_epi32(pair));
}

static inline void score_keys(const Bf16* keys, int size, const Bf16* queries, float* scores) {
  for (int k = 0; k < 16; ++k) {
    __m512 sum = _mm512_setzero_ps();
    for (int c = 0; c < size; c += 2) sum = dot_pairs(sum, queries + c * 16, keys + k * size + c);
    _mm512_storeu_ps(scores + k * 16, sum);
  }
}

static inline void begin_sums(int) { started = false; }

static inline void add_sums(int rows, const Bf16* x, const Bf16* y, const Bf16* a, const Bf16* b,
                            int blocks, float* out) {
  constexpr int kAtOnce = 8;  // rows whose sums are in registers
  for (int first = 0; first < rows; first += kAtOnce) {
    const int count = rows - first < kAtOnce ? rows - first : kAtOnce;
    const Bf16* here = (first < 16 ? x : y) + first % 16 * kBlock;
    float* to = out + first * kRows;
    __m512 sum[kAtOnce][2];
    for (int r = 0; r < count; ++r)
      for (int s = 0; s < 2; ++s)
        sum[r][s] = started ? _mm512_loadu_ps(to + r * kRows + 16 * s) : _mm512_setzero_ps();
    for (int k = 0; k < blocks; ++k)
      for (int pair = 0; pair < 16; ++pair)
        for (int r = 0; r < count; ++r) {
          const Bf16* number = here + k * kTile + r * kBlock + 2 * pair;
          const int line = k * kTile + pair * kBlock;
          sum[r][0] = dot_pairs(sum[r][0], a + line, number);
          sum[r][1] = dot_pairs(sum[r][1], b + line, number);
        }
    for (int r = 0; r < count; ++r)
      for (int s = 0; s < 2; ++s) _mm512_storeu_ps(to + r * kRows + 16 * s, sum[r][s]);
  }
  started = true;
}

static inline void end_sums(int, float*) {}

#endif

// Two neighbouring strips of a weight by any number of rows, `x` being in tiles.
//
// `each(first, rows)` is called for every group of up to 32 rows once `out` [32, 32] holds their
// sums; a strip is decoded once. `room` takes two decoded strips.
template <class Each>
static void multiply(const Weight& w, int pair, const Bf16* x, int total, Bf16* room, float* out,
                     Each each) {
  const int bytes = kTileBytes[w.format];
  const bool is_plain = w.format == kBf16;
  const int ahead = is_plain || total > kRows ? w.blocks : kDecoded;
  const Bf16* strips[2];
  auto lay = [&](int from, int count) {
    for (int s = 0; s < 2; ++s) {
      const uint8_t* data = w.data + ((int64_t)(2 * pair + s) * w.blocks + from) * bytes;
      if (is_plain) {
        strips[s] = reinterpret_cast<const Bf16*>(data);
      } else {
        Bf16* to = room + (int64_t)s * ahead * kTile;
        decode(data, w.format, count, to);
        strips[s] = to;
      }
    }
  };
  if (ahead >= w.blocks) lay(0, w.blocks);
  for (int first = 0; first < total; first += kRows) {
    const int rows = total - first < kRows ? total - first : kRows;
    const Bf16* here = x + (int64_t)first / 16 * w.blocks * kTile;
    const Bf16* below = here + (int64_t)w.blocks * kTile;
    begin_sums(rows);
    for (int k = 0; k < w.blocks; k += ahead) {
      const int count = w.blocks - k < ahead ? w.blocks - k : ahead;
      if (ahead < w.blocks) lay(k, count);
      add_sums(rows, here + k * kTile, below + k * kTile, strips[0], strips[1], count, out);
    }
    end_sums(rows, out);
    each(first, rows);
  }
}
