// What a drafter does beside its layers: the most likely tokens of its slots, and the keys and values
// of its context.

#include "checks.h"
#include "rows.h"

namespace blockdraft {
namespace {

constexpr int64_t kPiece = 4 * kLanes;

// What is no number counts as minus infinity.
inline Lanes numbers_only(Lanes x) { return select(x == x, x, all(-INFINITY)); }

template <typename T>
Lanes load_scores(const T* from, int64_t num) {
  if (num >= kLanes) return numbers_only(load(from));
  float some[kLanes];
  store(some, numbers_only(load_some(from, num)));
  for (int64_t i = num; i < kLanes; ++i) some[i] = -INFINITY;
  return load(some);
}

// The `num_kept` largest of `num` scores, the largest first and the first of equal ones, their places,
// and the sum of exp(score - largest) of all.
template <typename T>
void largest_of_row(const T* row, int64_t num, int64_t num_kept, float* values, int64_t* places,
                    float* total) {
  int64_t num_found = 0;
  float piece[kPiece];
  for (int64_t first = 0; first < num; first += kPiece) {
    const int64_t size = num - first < kPiece ? num - first : kPiece;
    Lanes most = all(-INFINITY);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes x = load_scores(row + first + i, size - i);
      store(piece + i, x);
      most = largest(most, x);
    }
    if (num_found == num_kept && !(largest(most) > values[num_kept - 1])) continue;
    for (int64_t i = 0; i < size; ++i) {
      if (num_found == num_kept && !(piece[i] > values[num_kept - 1])) continue;
      int64_t at = num_found < num_kept ? num_found++ : num_kept - 1;
      for (; at > 0 && values[at - 1] < piece[i]; --at) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
      }
      values[at] = piece[i];
      places[at] = first + i;
    }
  }
  const Lanes base = all(values[0] == -INFINITY ? 0.0f : values[0]);
  Lanes sums{};
  for (int64_t i = 0; i < num; i += kLanes)
    sums = sums + exponential(load_scores(row + i, num - i) - base);
  *total = sum(sums);
}

// Norms and rotates the keys of all layers of some tokens, and stores them and the values.
template <typename T>
void store_context(T* projected, const T* weights, const T* cosine, const T* sine,
                   const int64_t* slots, int64_t num_tokens, int64_t num_layers, const Layer& layer,
                   float eps, void* const* keys, void* const* values) {
  const int64_t head_dim = layer.head_dim, width = layer.kv_heads * head_dim;
  const size_t size = static_cast<size_t>(head_dim) * sizeof(T);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t index = 0; index < num_layers; ++index) {
      T* own_keys = projected + (token * num_layers + index) * 2 * width;
      for (int64_t head = 0; head < layer.kv_heads; ++head) {
        T *key = own_keys + head * head_dim, *value = key + width;
        norm_row(key, key, weights + index * head_dim, head_dim, eps, true);
        rotate_head(key, cosine + token * head_dim, sine + token * head_dim, head_dim / 2);
        const int64_t to = head * layer.head_stride + slots[token] * head_dim;
        std::memcpy(static_cast<T*>(keys[index]) + to, key, size);
        std::memcpy(static_cast<T*>(values[index]) + to, value, size);
      }
    }
  }
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// Of scores [num_rows, num]: values and places [num_rows, num_kept], totals [num_rows].
void blockdraft_largest(int is_bfloat16, float* values, int64_t* places, float* totals,
                        const void* scores, int64_t num_rows, int64_t num, int64_t num_kept) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      blockdraft::largest_of_row(static_cast<const T*>(scores) + row * num, num, num_kept,
                                 values + row * num_kept, places + row * num_kept, totals + row);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// projected: [num_tokens, num_layers, 2, kv_heads, head_dim], keys before values; overwritten.
// weights: [num_layers, head_dim], of the keys' norms. cosine, sine: [num_tokens, head_dim]. keys,
// values: the buffers of each layer, all like `layer`. Returns a Refusal; then nothing was written.
int blockdraft_store_context(int is_bfloat16, void* projected, const void* weights,
                             const void* cosine, const void* sine, const int64_t* slots,
                             int64_t num_tokens, int64_t num_layers,
                             const blockdraft::Layer* layer, float eps, void* const* keys,
                             void* const* values) {
  for (int64_t token = 0; token < num_tokens; ++token)
    if (slots[token] < 0 || slots[token] >= layer->num_slots) return blockdraft::kSlots;
  const auto run = [&](auto value) {
    using T = decltype(value);
    blockdraft::store_context(static_cast<T*>(projected), static_cast<const T*>(weights),
                              static_cast<const T*>(cosine), static_cast<const T*>(sine), slots,
                              num_tokens, num_layers, *layer, eps, keys, values);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
  return blockdraft::kNone;
}

}  // extern "C"
