// Recurrent layers of many rows; see recurrence.h.

#include "delta.h"
#include "scan.h"
#include "short_convolution.h"

namespace {

using namespace blockdraft;

// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelWork = 1 << 16;

// As kernels/cpu/recurrence.py has them.
enum Kind : int32_t { kDelta = 0, kScan = 1, kConvolution = 2 };

template <typename T>
void run(const RecurrenceCall& call) {
  if (call.rule->kind == kConvolution)
    short_convolution<T>(call);
  else if (call.rule->kind == kScan)
    recur<T, SelectiveScan<T>>(call);
  else if (call.rule->decays == 1)
    recur<T, DeltaRule<T, false>>(call);
  else
    recur<T, DeltaRule<T, true>>(call);
}

}  // namespace

extern "C" {

// The largest size of a head's keys.
int64_t blockdraft_recurrence_key_dim() { return kMaxKeyDim; }

// The most taps of a convolution.
int64_t blockdraft_recurrence_taps() { return kMaxTaps; }

// Columns of a panel of a state.
int64_t blockdraft_recurrence_panel() { return kPanel; }

void blockdraft_recurrence(int is_bfloat16, const void* call, int num_threads) {
  const auto& own = *static_cast<const RecurrenceCall*>(call);
  const auto act = is_bfloat16 ? run<BFloat16> : run<float>;
  const Recurrence& rule = *own.rule;
  const int64_t work =
      own.num_rows * (rule.values() * rule.key_dim + rule.channels * rule.taps);
  (void)num_threads;
  (void)work;
#pragma omp parallel num_threads(num_threads) if (work >= kMinParallelWork)
  act(own);
}

}  // extern "C"
