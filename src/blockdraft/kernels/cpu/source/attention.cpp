// Attention by itself, for layers whose other parts are not fused.

#include "attention.h"
#include "checks.h"

namespace blockdraft {
namespace {

template <typename T, typename Pool>
void run(const Plan& plan, const Layer& layer, T* output, const Rows<const T>& queries,
         const Rows<const T>& new_keys, const Rows<const T>& new_values, const Pool& keys,
         const Pool& values) {
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
    attend(plan, layer, parts, output, queries, keys, values);
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
                      int64_t value_head, const blockdraft::Pools* pools) {
  const blockdraft::Refusal refusal = blockdraft::refusal_of(*plan, *layer);
  if (refusal != blockdraft::kNone) return refusal;
  const auto run = [&](auto value) {
    using T = decltype(value);
    const auto rows = [](const void* from, int64_t row, int64_t head) {
      return blockdraft::Rows<const T>{static_cast<const T*>(from), row, head};
    };
    blockdraft::with_pools<T>(*pools, [&](const auto& keys, const auto& values) {
      blockdraft::run(*plan, *layer, static_cast<T*>(output), rows(queries, query_row, query_head),
                      rows(new_keys, key_row, key_head), rows(new_values, value_row, value_head),
                      keys, values);
    });
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
  return blockdraft::kNone;
}

}  // extern "C"
