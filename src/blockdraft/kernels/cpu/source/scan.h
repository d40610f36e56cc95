// The selective scan of Mamba 2: a token decays a matrix and adds its key times its value, both by a
// time step that it chooses itself. What it reads has a part of the value besides.

#pragma once

#include "recurrence.h"

namespace blockdraft {

template <typename T>
float rounded_value(float x) {
  T held[1];
  store_some(held, all(x), 1);
  return value_of(held[0]);
}

template <typename T>
struct SelectiveScan {
  static Places places(const Recurrence& rule) {
    return {rule.values() + rule.keys(), rule.values(), 0};
  }

  // The time steps, and what they leave of the states. The first one of a sequence has limits.
  static void prepare_row(const RecurrenceCall& call, int64_t row, bool begins) {
    const Recurrence& rule = *call.rule;
    const T* decay = row_of<T>(call.decay, call.decay_stride, row);
    for (int64_t head = 0; head < rule.value_heads; ++head) {
      const float sum = rounded_value<T>(value_of(decay[head]) + rule.decay_biases[head]);
      float step = rounded_value<T>(softplus(sum));
      // Not std::clamp: what is no number must stay none.
      if (begins && step < rule.min_start) step = rule.min_start;
      if (begins && step > rule.max_start) step = rule.max_start;
      call.writes[row * rule.value_heads + head] = step;
      call.decays[row * rule.value_heads + head] = std::exp(-rule.decay_rates[head] * step);
    }
  }

  static void step(Columns& state, const RowOfHead& row, int64_t key_dim, const Lanes* values,
                   Lanes* read) {
    float key_steps[kMaxKeyDim];
    in_lanes(0, key_dim, [&](int64_t i, auto num) {
      store_some(key_steps + i, rounded<T>(load_some(row.key + i, num) * row.write), num);
    });
    const Lanes decay = all(row.decays[0]);
    Sums found{};
    in_parts(key_dim, [&](int64_t place, int part) {
      const Lanes key = all(key_steps[place]), query = all(row.query[place]);
      for (int lane = 0; lane < kColumnLanes; ++lane) {
        float* own = state.values[place] + lane * kLanes;
        const Lanes changed = multiply_add(load(own), decay, rounded<T>(key * values[lane]));
        store(own, changed);
        found.parts[part][lane] = multiply_add(rounded<T>(changed), query, found.parts[part][lane]);
      }
    });
    for (int lane = 0; lane < kColumnLanes; ++lane)
      read[lane] = rounded<T>(found.of(lane)) + rounded<T>(values[lane] * row.skip);
  }
};

}  // namespace blockdraft
