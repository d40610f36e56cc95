// What a drafter does beside its layers: the keys and values of its context.

#include "checks.h"
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
