// Attention by itself, for layers whose other parts are not fused.

#include "attention.h"
#include "checks.h"

namespace blockdraft {
namespace {

template <typename T>
void run(const Plan& plan, const Layer& layer, T* output, const Rows<const T>& queries,
         const Rows<const T>& new_keys, const Rows<const T>& new_values, T* keys, T* values) {
  const std::vector<Part> parts = parts_of(plan, layer);
  const int64_t work = plan.num_keys * num_covered(plan) * layer.head_dim;
  (void)work;
#pragma omp parallel num_threads(plan.num_threads) if (parts.size() > 1 && \
                                                           work >= kMinParallelScores)
  {
    if (plan.slots != nullptr) {
      write_rows(keys, new_keys, plan, layer);
      write_rows(values, new_values, plan, layer);
    }
    attend(plan, layer, parts, output, queries, static_cast<const T*>(keys),
           static_cast<const T*>(values));
  }
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// Stores new keys and values where the plan has slots for them, then attends. Strides count values.
// Returns a Refusal; then nothing was read or written.
int blockdraft_attend(int is_bfloat16, const blockdraft::Plan* plan,
                      const blockdraft::Layer* layer, void* output, const void* queries,
                      int64_t query_row, int64_t query_head, const void* new_keys, int64_t key_row,
                      int64_t key_head, const void* new_values, int64_t value_row,
                      int64_t value_head, void* keys, void* values) {
  const blockdraft::Refusal refusal = blockdraft::refusal_of(*plan, *layer);
  if (refusal != blockdraft::kNone) return refusal;
  const auto run = [&](auto value) {
    using T = decltype(value);
    const auto rows = [](const void* from, int64_t row, int64_t head) {
      return blockdraft::Rows<const T>{static_cast<const T*>(from), row, head};
    };
    blockdraft::run(*plan, *layer, static_cast<T*>(output), rows(queries, query_row, query_head),
                    rows(new_keys, key_row, key_head), rows(new_values, value_row, value_head),
                    static_cast<T*>(keys), static_cast<T*>(values));
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
  return blockdraft::kNone;
}

}  // extern "C"
