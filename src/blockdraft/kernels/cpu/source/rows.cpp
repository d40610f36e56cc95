// What a decoder layer does to rows, part by part.

#include "rows.h"

namespace {

// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelValues = 1 << 15;

}  // namespace

extern "C" {

// RMS norm of input [num_rows, size]. With a residual the sum of both goes to `total` and is
// normed.
void blockdraft_norm(int is_bfloat16, void* output, void* total, const void* input,
                     const void* residual, const void* weight, int64_t num_rows, int64_t size,
                     float eps, int rounds_first, int num_threads) {
  const auto run = is_bfloat16 ? blockdraft::norm<blockdraft::BFloat16> : blockdraft::norm<float>;
  (void)num_threads;
#pragma omp parallel num_threads(num_threads) if (num_rows * size >= kMinParallelValues)
  run(output, total, input, residual, weight, num_rows, size, eps, rounds_first != 0);
}

// Rotates the first heads of each row in place, the queries' and then the keys', after a norm of
// each head where a weight is given. cosine and sine: [num_rows, head_dim].
void blockdraft_rotate(int is_bfloat16, void* heads, int64_t row_stride, const void* cosine,
                       const void* sine, const void* query_weight, const void* key_weight,
                       int64_t num_rows, int64_t num_queries, int64_t num_keys, int64_t head_dim,
                       float eps, int rounds_first, int num_threads) {
  const int64_t num_heads = num_queries + num_keys;
  const auto run = [&](auto value) {
    using T = decltype(value);
    const blockdraft::Rotation<T> rotation{static_cast<T*>(heads),
                                           row_stride,
                                           static_cast<const T*>(cosine),
                                           static_cast<const T*>(sine),
                                           static_cast<const T*>(query_weight),
                                           static_cast<const T*>(key_weight),
                                           num_queries,
                                           head_dim,
                                           eps,
                                           rounds_first != 0};
    (void)num_threads;
#pragma omp parallel for collapse(2) num_threads(num_threads) \
    if (num_rows * num_heads * head_dim >= kMinParallelValues)
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t index = 0; index < num_heads; ++index) rotation.run(row, index);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// silu(gate) * up of input [num_rows, 2 * size], gate before up.
void blockdraft_gate(int is_bfloat16, void* output, const void* input, int64_t num_rows,
                     int64_t size, int num_threads) {
  const auto run = is_bfloat16 ? blockdraft::gate<blockdraft::BFloat16> : blockdraft::gate<float>;
  (void)num_threads;
#pragma omp parallel num_threads(num_threads) if (num_rows * size >= kMinParallelValues)
  run(output, input, num_rows, size);
}

}  // extern "C"
