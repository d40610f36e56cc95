// A linear layer as the kernels know it, and how its sums are put out.

#pragma once

#include "lanes.h"

namespace blockdraft {

struct Product {
  const void* weight;
  const void* bias;  // [outputs] or null
  int64_t inputs;
  int64_t outputs;
  int64_t is_narrow;  // the weights are Narrow, or else what they are multiplied with
  // Of int8 weights, for each output, filled up to whole panels; null for other weights.
  const float* scales;
  int64_t group_bits;     // of a number of weights in groups, see groups.h; 0 for other weights
  int64_t has_minimums;   // these have minimums beside their scales
  int64_t is_read_again;  // within a pass of the target, so its weights may stay in the caches
};

// Up to 16 outputs of a row; none if `num_outputs` is not positive.
template <typename T>
void put_sums(T* to, Lanes sum, const T* bias, int64_t num_outputs) {
  if (num_outputs <= 0) return;
  const bool is_whole = num_outputs >= kLanes;
  if (bias != nullptr) sum = sum + (is_whole ? load(bias) : load_some(bias, num_outputs));
  if (is_whole)
    store(to, sum);
  else
    store_some(to, sum, num_outputs);
}

}  // namespace blockdraft
