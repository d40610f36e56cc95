// The gated delta rule: a token decays a matrix, and writes its value where its key reads something
// else. Queries and keys have the length 1.

#pragma once

#include "recurrence.h"

namespace blockdraft {

// A query or key in place, over its length, and by `scale`.
inline void to_length(float* head, int64_t size, float scale) {
  Lanes squares{};
  in_lanes(0, size, [&](int64_t i, auto num) {
    const Lanes x = load_some(head + i, num);
    squares = multiply_add(x, x, squares);
  });
  const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
  in_lanes(0, size, [&](int64_t i, auto num) {
    store_some(head + i, load_some(head + i, num) * factor * scale, num);
  });
}

template <typename T, bool kDecaysByKey>
struct DeltaRule {
  static Places places(const Recurrence& rule) { return {0, rule.keys(), 2 * rule.keys()}; }

  // How much of the states stays, how much is written, and with which keys.
  static void prepare_row(const RecurrenceCall& call, int64_t row, bool) {
    const Recurrence& rule = *call.rule;
    float* keys = call.convolved + row * rule.channels;
    const float scale = 1.0f / std::sqrt(static_cast<float>(rule.key_dim));
    for (int64_t head = 0; head < 2 * rule.key_heads; ++head)
      to_length(keys + head * rule.key_dim, rule.key_dim, head < rule.key_heads ? scale : 1.0f);
    const int64_t num_decays = rule.value_heads * rule.decays;
    const T* decay = row_of<T>(call.decay, call.decay_stride, row);
    for (int64_t i = 0; i < num_decays; ++i) {
      const float raised = softplus(value_of(decay[i]) + rule.decay_biases[i]);
      call.decays[row * num_decays + i] = std::exp(-rule.decay_rates[i / rule.decays] * raised);
    }
    const T* write = row_of<T>(call.write, call.write_stride, row);
    float* writes = call.writes + row * rule.value_heads;
    in_lanes(0, rule.value_heads, [&](int64_t i, auto num) {
      const Lanes opened = rounded<T>(sigmoid(load_some(write + i, num)));
      store_some(writes + i, opened * rule.write_scale, num);
    });
  }

  static void step(Columns& state, const RowOfHead& row, int64_t key_dim, const Lanes* values,
                   Lanes* read) {
    const Lanes all_decay = all(row.decays[0]);
    const auto decayed = [&](int64_t place, int lane) {
      const Lanes decay = kDecaysByKey ? all(row.decays[place]) : all_decay;
      return load(state.values[place] + lane * kLanes) * decay;
    };
    Sums held{}, found{};
    in_parts(key_dim, [&](int64_t place, int part) {
      const Lanes key = all(row.key[place]);
      for (int lane = 0; lane < kColumnLanes; ++lane)
        held.parts[part][lane] = multiply_add(decayed(place, lane), key, held.parts[part][lane]);
    });
    Lanes written[kColumnLanes];
    for (int lane = 0; lane < kColumnLanes; ++lane)
      written[lane] = (values[lane] - held.of(lane)) * row.write;
    in_parts(key_dim, [&](int64_t place, int part) {
      const Lanes key = all(row.key[place]), query = all(row.query[place]);
      for (int lane = 0; lane < kColumnLanes; ++lane) {
        const Lanes changed = multiply_add(key, written[lane], decayed(place, lane));
        store(state.values[place] + lane * kLanes, changed);
        found.parts[part][lane] = multiply_add(changed, query, found.parts[part][lane]);
      }
    });
    for (int lane = 0; lane < kColumnLanes; ++lane) read[lane] = found.of(lane);
  }
};

}  // namespace blockdraft
