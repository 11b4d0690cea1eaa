// One pass of a dense decoder (Llama, Mistral, Qwen2, Qwen3) over the nodes of a batch of trees.
//
// Draft networks are decoders of a few layers that read states beside tokens: joined by a linear
// layer (EAGLE-1), or side by side in the first layer's attention (EAGLE-3).
//
// A layer is five jobs of the pool: projections with rotary positions and the cache's writes, by
// head; attention; the output projection; gate and up; down. All else is done in between, once.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "attention.hpp"
#include "noise.hpp"
#include "pool.hpp"
#include "rank.hpp"
#include "tiles.hpp"

struct Layer {
  const float *attention_norm, *query_norm, *key_norm, *mlp_norm;  // query and key: or null
  Weight qkv, output, gate_up, down;  // gate_up: strips of gate and up in turn
  int32_t window;                     // positions a node looks back; 0 for all
};

struct Model {
  int32_t num_layers, hidden, intermediate, heads, kv_heads, head_size, vocab_size;
  int32_t keeps_normed;  // the stream of a first layer that reads states begins as their norm
  float eps;
  const Layer* layers;
  const float* final_norm;               // or null: what comes out is read as it is
  const float *token_norm, *state_norm;  // of a first layer that reads both; or null
  Weight join;                           // of tokens and states to the stream; no data: none
  Weight head;
};

struct Pass {
  int32_t num_nodes, num_rows, num_taps, num_logits;
  const Bf16* embedded;    // [nodes, hidden]; null: no layer runs, states are read out
  const Bf16* states;      // [nodes, hidden], or null where the model reads tokens alone
  const int64_t* positions;
  const float *cos, *sin;  // [P, head_size]; the first half of the sines is negated
  const Row* rows;
  const int32_t* node_rows;  // the row of each node
  Bf16 *keys, *values;       // [layers, rows, kv_heads, slots, head_size]
  int64_t layer_stride, row_stride, head_stride;  // numbers; the layer's may be 0
  const int32_t* taps;       // ascending or not
  Bf16* features;            // [nodes, taps * hidden]
  Bf16* last_hidden;         // [nodes, hidden]
  Bf16* streams;             // [nodes, hidden], what the final norm was given; or null
  const int32_t* logit_nodes;  // whose logits are wanted
  float* logits;             // [num_logits, vocab_size]
};

static int padded(int n, int unit) { return (n + unit - 1) / unit * unit; }

template <class T>
class Room {  // memory that only grows, zeroed when it does
 public:
  T* of(size_t count) {
    if (count > size_) {
      data_.reset(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 4095) / 4096 * 4096)));
      std::memset(data_.get(), 0, count * sizeof(T));
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

class TileRoom {  // for activations that a weight is multiplied by
 public:
  Activations of(int rows, const Weight& w) {
    const size_t numbers = (size_t)rows * w.blocks;
    const bool widens = kWidens && !w.rounds;
    return {x_.of(numbers * kBlock),
            w.blocks,
            w.planes ? sums_.of(numbers) : nullptr,
            widens ? wide_.of(numbers * kBlock) : nullptr,
            w.rounds ? rounded_.of(numbers * kFours) : nullptr,
            w.rounds ? scales_.of(numbers) : nullptr};
  }

 private:
  Room<Bf16> x_;
  Room<int32_t> rounded_;
  Room<float> sums_, wide_, scales_;
};

// What products need beside the activations themselves, once those are complete.
static void complete(const Activations& from, int rows) {
  if (from.rounded) return round_blocks(from, rows);
  if (from.block_sums) sum_blocks(from, rows);
  if (from.wide) widen(from, rows);
}

class Decoder {
 public:
  Decoder(const Model& model, int num_threads)
      : m_(model), pool_(shared_pool(num_threads)), private_(num_threads) {}

  // Returns how many rows hold NaN.
  int run(const Pass& pass) {
#ifdef __AMX_BF16__
    tile_shape = -1;  // other libraries use this thread's tiles too
#endif
    const std::lock_guard<std::mutex> alone(pool_.turn);  // callers may be threads of their own
    p_ = &pass;
    n_ = pass.num_nodes;
    x_ = stream_.of((size_t)padded(n_, kRows) * m_.hidden);
    pool_.open();
    std::fill(seconds_, seconds_ + kParts, 0.0);
    begun_ = now();
    const size_t stream_bytes = (size_t)n_ * m_.hidden * sizeof(Bf16);
    if (pass.embedded) {
      run_layers();
    } else {
      std::memcpy(x_, pass.states, stream_bytes);
    }
    if (pass.streams) std::memcpy(pass.streams, x_, stream_bytes);
    if (!m_.final_norm) std::memcpy(pass.last_hidden, x_, stream_bytes);
    for (int r = 0; m_.final_norm && r < n_; ++r)
      norm_row(x_ + (size_t)r * m_.hidden, m_.final_norm, m_.hidden,
               [&](int c) { return pass.last_hidden + (size_t)r * m_.hidden + c; });
    tap(m_.num_layers, pass.last_hidden);
    lap(kOther);
    read_out();
    lap(kHead);
    pool_.close();
#ifdef __AMX_BF16__
    _tile_release();
#endif
    return broken_rows();
  }

  const double* seconds() const { return seconds_; }

 private:
  enum Part { kProjections, kAttention, kMlp, kHead, kOther, kParts };

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void lap(Part part) {
    const double at = now();
    seconds_[part] += at - begun_;
    begun_ = at;
  }

  struct Private {  // a thread's own memory
    Room<Bf16> decoded;
    Room<float> sums, scores;
  };

  void run_layers() {
    const int rows = padded(n_, kRows);
    const Layer& any = m_.layers[0];
    q_width_ = m_.heads * m_.head_size;
    a_ = attended_.of(rows, any.output);
    i_ = inner_.of(rows, any.down);
    q_ = queries_.of((size_t)rows * q_width_);
    plan_ = plan_attention(p_->rows, p_->num_rows, m_.heads / m_.kv_heads,
                           m_.kv_heads, pool_.size(), masks_);
    enter();
    for (int l = 0; l < m_.num_layers; ++l) {
      tap(l, x_);
      const Layer& layer = m_.layers[l];
      const bool reads_both = l == 0 && m_.token_norm;
      h_ = (reads_both ? both_ : normed_).of(rows, layer.qkv);
      if (reads_both) {
        normalise_both();
      } else {
        normalise(layer.attention_norm);
      }
      lap(kOther);
      project(layer, l);
      lap(kProjections);
      attend(layer, l);
      lap(kAttention);
      add(layer.output, a_);
      lap(kProjections);
      h_ = normed_.of(rows, layer.gate_up);
      normalise(layer.mlp_norm);
      lap(kOther);
      activate(layer.gate_up);
      add(layer.down, i_);
      lap(kMlp);
    }
  }

  // What the stream begins as.
  void enter() {
    const size_t numbers = (size_t)n_ * m_.hidden;
    if (!m_.join.data) {
      std::memcpy(x_, m_.token_norm ? p_->states : p_->embedded, numbers * sizeof(Bf16));
      return;
    }
    h_ = both_.of(padded(n_, kRows), m_.join);
    for (int r = 0; r < n_; ++r)
      for (int c = 0; c < m_.hidden; c += 16) {
        const size_t from = (size_t)r * m_.hidden + c;
        std::memcpy(h_.x + in_tiles(r, c, h_.blocks), p_->embedded + from, 16 * sizeof(Bf16));
        std::memcpy(h_.x + in_tiles(r, m_.hidden + c, h_.blocks), p_->states + from,
                    16 * sizeof(Bf16));
      }
    complete(h_, n_);
    std::memset(x_, 0, numbers * sizeof(Bf16));
    add(m_.join, h_);
    lap(kProjections);
  }

  // The stream's norm in tiles; without a weight the stream itself.
  void normalise(const float* weight) {
    for (int r = 0; r < n_; ++r) {
      const Bf16* x = x_ + (size_t)r * m_.hidden;
      auto place = [&](int c) { return h_.x + in_tiles(r, c, h_.blocks); };
      if (weight) {
        norm_row(x, weight, m_.hidden, place);
      } else {
        for (int c = 0; c < m_.hidden; c += 16) std::memcpy(place(c), x + c, 16 * sizeof(Bf16));
      }
    }
    complete(h_, n_);
  }

  // The norms of tokens and states in tiles, side by side.
  void normalise_both() {
    for (int r = 0; r < n_; ++r) {
      Bf16* x = x_ + (size_t)r * m_.hidden;
      norm_row(p_->embedded + (size_t)r * m_.hidden, m_.token_norm, m_.hidden,
               [&](int c) { return h_.x + in_tiles(r, c, h_.blocks); });
      norm_row(x, m_.state_norm, m_.hidden,
               [&](int c) { return h_.x + in_tiles(r, m_.hidden + c, h_.blocks); });
      for (int c = 0; m_.keeps_normed && c < m_.hidden; c += 16)
        std::memcpy(x + c, h_.x + in_tiles(r, m_.hidden + c, h_.blocks), 16 * sizeof(Bf16));
    }
    complete(h_, n_);
  }

  // RMS norm, rounded as Hugging Face does; `place(c)` is where 16 numbers from column c on go.
  template <class Place>
  void norm_row(const Bf16* x, const float* weight, int size, Place place) const {
    __m512 sum = _mm512_setzero_ps();
    for (int c = 0; c < size; c += 16) {
      const __m512 v = load_bf16(x + c);
      sum = _mm512_fmadd_ps(v, v, sum);
    }
    const float scale = 1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / size + m_.eps);
    for (int c = 0; c < size; c += 16) {
      Bf16 rounded[16];
      store_bf16(rounded, _mm512_mul_ps(load_bf16(x + c), _mm512_set1_ps(scale)));
      store_bf16(place(c), _mm512_mul_ps(load_bf16(rounded), _mm512_loadu_ps(weight + c)));
    }
  }

  void tap(int index, const Bf16* x) {
    const size_t width = (size_t)p_->num_taps * m_.hidden;
    for (int t = 0; t < p_->num_taps; ++t) {
      if (p_->taps[t] != index) continue;
      for (int r = 0; r < n_; ++r)
        std::memcpy(p_->features + r * width + t * m_.hidden, x + (size_t)r * m_.hidden,
                    m_.hidden * sizeof(Bf16));
    }
  }

  Bf16* decoding(const Weight& w, int thread) {
    return private_[thread].decoded.of((size_t)2 * kTile * std::max(2, w.blocks * w.planes));
  }

  // q, k, v of every node, a head (or two small ones) a part: norms, rotary positions, the cache.
  void project(const Layer& layer, int l) {
    const int size = m_.head_size, wide = std::max(size, kRows), pairs = wide / kRows;
    const int num_heads = m_.heads + 2 * m_.kv_heads;
    auto body = [&, l](int part, int thread) {
      // Rows of `wide` sums for one group of nodes.
      float* sums = private_[thread].sums.of((size_t)padded(n_, kRows) * wide);
      for (int pair = 0; pair < pairs; ++pair) {
        if (part * pairs + pair >= layer.qkv.strips / 2) break;
        // One pair of strips writes its 32 columns of every node.
        float* room = pair_room(thread);
        multiply(layer.qkv, part * pairs + pair, h_, n_, decoding(layer.qkv, thread), room,
                 [&](int first, int rows) {
                   for (int r = 0; r < rows; ++r)
                     std::memcpy(sums + (size_t)(first + r) * wide + pair * kRows, room + r * kRows,
                                 kRows * sizeof(float));
                 });
      }
      for (int from = 0; from < wide; from += size) {
        const int head = part * wide / size + from / size;
        if (head >= num_heads) break;
        for (int r = 0; r < n_; ++r)
          place(layer, l, head, r, sums + (size_t)r * wide + from);
      }
    };
    const int parts = (num_heads * size + wide - 1) / wide;
    pool_.run(parts, body);
  }

  // One head of one node: bias, norm and rotary position, then to the queries or the cache.
  void place(const Layer& layer, int l, int head, int node, float* sums) {
    const int size = m_.head_size, half = size / 2;
    alignas(64) Bf16 x[256], normed[256];
    for (int c = 0; c < size; c += 16) {
      __m512 v = _mm512_loadu_ps(sums + c);
      if (layer.qkv.bias)
        v = _mm512_add_ps(v, _mm512_loadu_ps(layer.qkv.bias + head * size + c));
      store_bf16(x + c, v);
    }
    const bool is_query = head < m_.heads, is_value = head >= m_.heads + m_.kv_heads;
    const Row& row = p_->rows[p_->node_rows[node]];
    const int slot = row.slot_of(node);
    Bf16* to;
    if (is_query) {
      to = q_ + (size_t)node * q_width_ + head * size;
    } else {
      const int kv = head - m_.heads - (is_value ? m_.kv_heads : 0);
      to = (is_value ? p_->values : p_->keys) + l * p_->layer_stride +
           row.slot * p_->row_stride + kv * p_->head_stride + (int64_t)slot * size;
    }
    if (is_value) {
      std::memcpy(to, x, size * sizeof(Bf16));
      return;
    }
    const float* weight = is_query ? layer.query_norm : layer.key_norm;
    const Bf16* from = x;
    if (weight) {
      norm_row(x, weight, size, [&](int c) { return normed + c; });
      from = normed;
    }
    const float* cos = p_->cos + p_->positions[node] * size;
    const float* sin = p_->sin + p_->positions[node] * size;
    for (int c = 0; c < size; ++c) {
      const int other = c < half ? c + half : c - half;
      sums[c] = from_bf16(from[c]) * cos[c] + from_bf16(from[other]) * sin[c];
    }
    for (int c = 0; c < size; c += 16) store_bf16(to + c, _mm512_loadu_ps(sums + c));
  }

  void attend(const Layer& layer, int l) {
    const int size = m_.head_size, groups = m_.heads / m_.kv_heads;
    const int items = static_cast<int>(plan_.items.size());
    auto body = [&, l](int part, int thread) {
      const int kv = part / items;
      const Item& item = plan_.items[part % items];
      const Row& row = p_->rows[item.row];
      const int64_t at = l * p_->layer_stride + row.slot * p_->row_stride + kv * p_->head_stride;
      Head head{p_->keys + at, p_->values + at, q_ + (size_t)row.first * q_width_ + kv * groups * size,
                a_.x, kv * groups * size, q_width_, a_.blocks, size, groups,
                static_cast<int>(p_->head_stride / size)};
      const int scores = padded(row.end(), 16) * item.count;
      attend_item(head, row, item, masks_.data() + item.masks,
                  p_->positions + row.first, layer.window,
                  private_[thread].scores.of(scores));
    };
    pool_.run(items * m_.kv_heads, body);
    complete(a_, n_);
  }

  // stream += x times weight
  void add(const Weight& w, const Activations& x) {
    auto body = [&](int pair, int thread) {
      float* room = pair_room(thread);
      const int columns = std::min(kRows, m_.hidden - pair * kRows);
      multiply(w, pair, x, n_, decoding(w, thread), room, [&](int first, int rows) {
        for (int r = 0; r < rows; ++r) {
          Bf16* to = x_ + (size_t)(first + r) * m_.hidden + pair * kRows;
          for (int c = 0; c < columns; c += 16) {
            __m512 v = _mm512_loadu_ps(room + r * kRows + c);
            if (w.bias) v = _mm512_add_ps(v, _mm512_loadu_ps(w.bias + pair * kRows + c));
            store_bf16(to + c, _mm512_add_ps(v, load_bf16(to + c)));
          }
        }
      });
    };
    pool_.run(w.strips / 2, body);
  }

  // silu(gate) * up: a pair of strips is 16 outputs of either.
  void activate(const Weight& w) {
    auto body = [&](int pair, int thread) {
      float* room = pair_room(thread);
      multiply(w, pair, h_, n_, decoding(w, thread), room, [&](int first, int rows) {
        for (int r = 0; r < rows; ++r) {
          __m512 gate = _mm512_loadu_ps(room + r * kRows), up = _mm512_loadu_ps(room + r * kRows + 16);
          if (w.bias) {
            gate = _mm512_add_ps(gate, _mm512_loadu_ps(w.bias + pair * kRows));
            up = _mm512_add_ps(up, _mm512_loadu_ps(w.bias + pair * kRows + 16));
          }
          const __m512 one = _mm512_set1_ps(1.0f);
          const __m512 below = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
          const __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, below));
          store_bf16(i_.x + in_tiles(first + r, pair * 16, i_.blocks),
                     _mm512_mul_ps(silu, up));
        }
      });
    };
    pool_.run(w.strips / 2, body);
    complete(i_, n_);
  }

  void read_out() {
    const int count = p_->num_logits;
    const Activations x = wanted_.of(padded(count, kRows), m_.head);
    for (int r = 0; r < count; ++r)
      for (int c = 0; c < m_.hidden; c += 16)
        std::memcpy(x.x + in_tiles(r, c, x.blocks),
                    p_->last_hidden + (size_t)p_->logit_nodes[r] * m_.hidden + c, 16 * sizeof(Bf16));
    complete(x, count);
    constexpr int kTogether = 4;  // pairs a part
    // A head may have more rows than there are tokens: whole pairs of strips are left out.
    const int pairs = std::min(m_.head.strips / 2, (m_.vocab_size + kRows - 1) / kRows);
    auto body = [&](int part, int thread) {
      float* room = pair_room(thread);
      for (int pair = part * kTogether; pair < std::min(pairs, (part + 1) * kTogether); ++pair) {
        const int columns = std::min(kRows, m_.vocab_size - pair * kRows);
        multiply(m_.head, pair, x, count, decoding(m_.head, thread), room,
                 [&](int first, int rows) {
                   for (int r = 0; r < rows; ++r) {
                     float* to = p_->logits + (size_t)(first + r) * m_.vocab_size + pair * kRows;
                     std::memcpy(to, room + r * kRows, columns * sizeof(float));
                     if (m_.head.bias)
                       for (int c = 0; c < columns; ++c) to[c] += m_.head.bias[pair * kRows + c];
                   }
                 });
      }
    };
    if (count) pool_.run((pairs + kTogether - 1) / kTogether, body);
  }

  // Rows with NaN in a node's last hidden state, or in the first of their logits.
  int broken_rows() {
    broken_.assign(p_->num_rows, 0);
    for (int r = 0; r < p_->num_rows; ++r) {
      const Row& row = p_->rows[r];
      const Bf16* from = p_->last_hidden + (size_t)row.first * m_.hidden;
      for (size_t c = 0; c < (size_t)row.width * m_.hidden; c += 16) {
        const __m512 x = load_bf16(from + c);
        broken_[r] |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      }
    }
    for (int l = 0, before = -1; l < p_->num_logits && p_->num_rows; ++l) {
      const int r = p_->node_rows[p_->logit_nodes[l]];
      if (r == before) continue;
      before = r;
      const float* from = p_->logits + (size_t)l * m_.vocab_size;
      for (int c = 0; c < m_.vocab_size; c += 16) {
        const __mmask16 inside = m_.vocab_size - c < 16 ? (1 << (m_.vocab_size - c)) - 1 : 0xffff;
        const __m512 x = _mm512_maskz_loadu_ps(inside, from + c);
        broken_[r] |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      }
    }
    return static_cast<int>(std::count_if(broken_.begin(), broken_.end(), [](int x) { return x; }));
  }

  // The sums of one pair of strips, behind a thread's other sums.
  static float* pair_room(int) {
    alignas(64) static thread_local float room[kRows * kRows];
    return room;
  }

  const Model m_;
  Pool& pool_;
  std::vector<Private> private_;
  const Pass* p_ = nullptr;
  int n_ = 0, q_width_ = 0;
  Bf16 *x_ = nullptr, *q_ = nullptr;
  Activations h_{}, a_{}, i_{};  // inputs of the projections, of the output and of down
  Room<Bf16> stream_, queries_;
  TileRoom normed_, both_, attended_, inner_, wanted_;
  double seconds_[kParts] = {}, begun_ = 0;  // of the last pass
  Plan plan_;
  std::vector<uint16_t> masks_;
  std::vector<int> broken_;  // by row
};

extern "C" {

// 1 where this processor can run the code that was compiled for it, else 0.
int slipstream_ready() {
#ifdef __AMX_BF16__
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return 1;
#endif
}

void* slipstream_open(const Model* model, int num_threads) {
  return new Decoder(*model, num_threads);
}
void slipstream_close(void* decoder) { delete static_cast<Decoder*>(decoder); }
const double* slipstream_seconds(void* decoder) {
  return static_cast<Decoder*>(decoder)->seconds();
}
void slipstream_first(const float* scores, int rows, int64_t size, int64_t* ids) {
  for (int r = 0; r < rows; ++r) ids[r] = first_of_row(scores + r * size, size);
}
void slipstream_rank(const float* scores, int rows, int64_t size, int count, float* best,
                     int64_t* ids) {
  for (int r = 0; r < rows; ++r)
    rank_row(scores + r * size, size, count, best + r * count, ids + r * count);
}
void slipstream_noise(uint64_t key, int64_t count, float* out) { gumbel(key, count, out); }
int slipstream_run(void* decoder, const Pass* pass) {
  return static_cast<Decoder*>(decoder)->run(*pass);
}
}
