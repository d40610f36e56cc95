// What a drafter does beside its layers: the most likely tokens of its slots, and the keys and values
// of its context.

#include "checks.h"
#include "largest.h"
#include "rows.h"

namespace blockdraft {
namespace {

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

// places: [num_rows], of the first largest of scores [num_rows, num].
void blockdraft_first_largest(int is_bfloat16, int64_t* places, const void* scores,
                              int64_t num_rows, int64_t num) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      places[row] = blockdraft::first_largest(static_cast<const T*>(scores) + row * num, num);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// The same numbers, [num] each.
void blockdraft_widen(float* to, const void* from, int64_t num) {
  using namespace blockdraft;
  const BFloat16* narrow = static_cast<const BFloat16*>(from);
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes) store(to + i, load(narrow + i));
  if (i < num) store_some(to + i, load_some(narrow + i, num - i), num - i);
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
