// The gated delta rule of many rows; see delta.h.

#include "delta.h"

namespace {

// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelWork = 1 << 16;

}  // namespace

extern "C" {

// The largest size of a head's keys.
int64_t blockdraft_delta_key_dim() { return blockdraft::kMaxKeyDim; }

// The most taps of a convolution.
int64_t blockdraft_delta_taps() { return blockdraft::kMaxTaps; }

// Columns of a panel of a state.
int64_t blockdraft_delta_panel() { return blockdraft::kPanel; }

void blockdraft_delta(int is_bfloat16, const void* call, int num_threads) {
  const auto& own = *static_cast<const blockdraft::DeltaCall*>(call);
  const auto run = is_bfloat16 ? blockdraft::delta<blockdraft::BFloat16> : blockdraft::delta<float>;
  const int64_t work = own.num_rows * own.rule->values() * own.rule->key_dim;
  (void)num_threads;
  (void)work;
#pragma omp parallel num_threads(num_threads) if (work >= kMinParallelWork)
  run(own);
}

}  // extern "C"
