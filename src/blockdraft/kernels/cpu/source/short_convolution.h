// A layer that is a convolution alone, times a gate.

#pragma once

#include "recurrence.h"

namespace blockdraft {

// Shares its work among the threads of the region that calls it.
template <typename T>
void short_convolution(const RecurrenceCall& call) {
  convolve<T>(call, call.output != nullptr, [&](int64_t row, int64_t i, Lanes sum, auto num) {
    const T* gate = row_of<T>(call.gate, call.gate_stride, row) + i;
    T* to = static_cast<T*>(call.output) + row * call.rule->channels + i;
    store_some(to, rounded<T>(sum) * load_some(gate, num), num);
  });
}

}  // namespace blockdraft
