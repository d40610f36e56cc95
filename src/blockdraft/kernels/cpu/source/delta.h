// Layers whose memory is a matrix for each head, changed by a gated delta rule: a token decays it,
// and writes its value where its key reads something else. Before it a causal convolution over
// queries, keys and values, behind it a norm with a gate.
//
// Rows of many sequences at once. A column of the matrix changes by itself, so each thread takes
// some columns of a head through all rows. Every row has the bits that it has alone: its sums run
// in the order of the source, and its state is that of the rows before it, wherever these were cut.

#pragma once

#include <algorithm>

#include "rows.h"

namespace blockdraft {

constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kMaxTaps = 8;

// A state lies in panels of kLanes columns, filled up with zeros: each is read front to back.
constexpr int64_t kPanel = kLanes;

// Panels that a thread steps at once.
constexpr int kColumnLanes = BLOCKDRAFT_TWO_REGISTERS ? 1 : 2;

// Sums of every fourth row of the state, which do not wait for each other.
constexpr int kSums = 4;

struct DeltaRule {
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  int64_t decays;           // of a head: one, or one for each of its keys' values
  const float* convolution;  // [taps, channels]
  const float* convolution_bias;
  const float* decay_rates;   // [value_heads]
  const float* decay_biases;  // [value_heads, decays]
  const float* norm;          // [value_dim]
  float write_scale;
  float eps;
  int32_t rounds_first;
  int32_t gate_is_sigmoid;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t panels() const { return (value_dim + kPanel - 1) / kPanel; }  // of a head
};

// Rows of one sequence. Those of a call run in their order, so that one may go on where another
// one ended. Without a state from before all of it is 0.
struct DeltaSpan {
  int64_t first, num_rows;
  const void* inputs_before;  // of the convolution, [taps - 1, channels]
  const float* before;        // [value_heads, panels, key_dim, kPanel]
  void* inputs_after;
  float* after;
};

struct DeltaCall {
  const DeltaRule* rule;
  const void *qkv, *decay, *write, *gate;
  int64_t qkv_stride, decay_stride, write_stride, gate_stride;  // from row to row
  void* output;                                                 // [rows, values]; or none
  // What lies between the parts, of each row.
  float *convolved, *decays, *writes, *read;
  const DeltaSpan* spans;  // they follow each other from row 0 on, to the last row
  int64_t num_spans, num_rows;
};

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename T>
const T* row_of(const void* rows, int64_t stride, int64_t row) {
  return static_cast<const T*>(rows) + row * stride;
}

// Some channels of the convolution of one row. `inputs`: of its taps, null for zeros.
template <typename T, typename Load, typename Store>
void convolve(const DeltaRule& rule, const T* const* inputs, int64_t first, const Load& get,
              const Store& put) {
  const float* bias = rule.convolution_bias;
  Lanes sum = bias == nullptr ? Lanes{} : get(bias + first);
  for (int64_t tap = 0; tap < rule.taps; ++tap) {
    const Lanes input = inputs[tap] == nullptr ? Lanes{} : get(inputs[tap] + first);
    sum = multiply_add(input, get(rule.convolution + tap * rule.channels() + first), sum);
  }
  put(rounded<T>(silu(rounded<T>(sum))));
}

// Channels from `begin` to `end` of the convolution, through all spans.
template <typename T>
void convolve_channels(const DeltaCall& call, int64_t begin, int64_t end) {
  const DeltaRule& rule = *call.rule;
  const int64_t channels = rule.channels(), held = rule.taps - 1;
  for (int64_t index = 0; index < call.num_spans; ++index) {
    const DeltaSpan& span = call.spans[index];
    const T* before = static_cast<const T*>(span.inputs_before);
    // The input `place` rows behind the first one of the span, null before the sequence.
    const auto input = [&](int64_t place) -> const T* {
      if (place >= 0) return row_of<T>(call.qkv, call.qkv_stride, span.first + place);
      return before == nullptr ? nullptr : before + (held + place) * channels;
    };
    for (int64_t row = 0; row < span.num_rows; ++row) {
      const T* inputs[kMaxTaps];
      for (int64_t tap = 0; tap < rule.taps; ++tap) inputs[tap] = input(row + tap - held);
      float* to = call.convolved + (span.first + row) * channels;
      int64_t i = begin;
      for (; i + kLanes <= end; i += kLanes)
        convolve(rule, inputs, i, [](const auto* from) { return load(from); },
                 [&](Lanes x) { store(to + i, x); });
      if (i < end)
        convolve(rule, inputs, i, [&](const auto* from) { return load_some(from, end - i); },
                 [&](Lanes x) { store_some(to + i, x, end - i); });
    }
    T* after = static_cast<T*>(span.inputs_after);
    for (int64_t place = 0; place < held; ++place) {
      const T* from = input(span.num_rows + place - held);
      T* to = after + place * channels;
      if (from == nullptr)
        std::fill(to + begin, to + end, T{});
      else
        std::copy(from + begin, from + end, to + begin);
    }
  }
}

// A query or key in place, over its length, and by `scale`.
inline void to_length(float* head, int64_t size, float scale) {
  Lanes squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Lanes x = load(head + i);
    squares = multiply_add(x, x, squares);
  }
  if (i < size) {
    const Lanes x = load_some(head + i, size - i);
    squares = multiply_add(x, x, squares);
  }
  const float factor = 1.0f / std::sqrt(sum(squares) + 1e-6f);
  for (i = 0; i + kLanes <= size; i += kLanes) store(head + i, load(head + i) * factor * scale);
  if (i < size) {
    const int64_t rest = size - i;
    store_some(head + i, load_some(head + i, rest) * factor * scale, rest);
  }
}

inline float value_of(float x) { return x; }

inline float value_of(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One value at a time: the library's functions of one value do not look at the others.
inline float decay_of(float gate, float bias, float rate) {
  const float x = gate + bias;
  return std::exp(-rate * (x > 20.0f ? x : std::log1p(std::exp(x))));
}

// What a row does to the states: how much of them stays, how much it writes, and with which keys.
template <typename T>
void prepare_row(const DeltaCall& call, int64_t row) {
  const DeltaRule& rule = *call.rule;
  float* keys = call.convolved + row * rule.channels();
  const float scale = 1.0f / std::sqrt(static_cast<float>(rule.key_dim));
  for (int64_t head = 0; head < 2 * rule.key_heads; ++head)
    to_length(keys + head * rule.key_dim, rule.key_dim, head < rule.key_heads ? scale : 1.0f);
  const int64_t num_decays = rule.value_heads * rule.decays;
  const T* decay = row_of<T>(call.decay, call.decay_stride, row);
  for (int64_t i = 0; i < num_decays; ++i)
    call.decays[row * num_decays + i] =
        decay_of(value_of(decay[i]), rule.decay_biases[i], rule.decay_rates[i / rule.decays]);
  const T* write = row_of<T>(call.write, call.write_stride, row);
  float* writes = call.writes + row * rule.value_heads;
  int64_t i = 0;
  for (; i < rule.value_heads; i += kLanes) {
    const int64_t num = std::min<int64_t>(kLanes, rule.value_heads - i);
    const Lanes opened = rounded<T>(sigmoid(load_some(write + i, num)));
    store_some(writes + i, opened * rule.write_scale, num);
  }
}

// Some panels of the state of a head, beside each other.
struct Columns {
  float values[kMaxKeyDim][kColumnLanes * kLanes];
};

struct RowOfHead {
  const float *query, *key, *value, *decays;
  float write;
};

// Sums over the rows of a state, of each column by itself.
struct Sums {
  Lanes parts[kSums][kColumnLanes];

  Lanes of(int lane) const {
    return (parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane]);
  }
};

// Decays, writes and reads. `values`, `read`: of these columns.
template <bool kDecaysByKey>
void step(Columns& state, const RowOfHead& row, int64_t key_dim, const Lanes* values, Lanes* read) {
  const Lanes all_decay = all(row.decays[0]);
  const auto decayed = [&](int64_t place, int lane) {
    const Lanes decay = kDecaysByKey ? all(row.decays[place]) : all_decay;
    return load(state.values[place] + lane * kLanes) * decay;
  };
  Sums held{}, found{};
  const auto add_held = [&](int64_t place, int part) {
    const Lanes key = all(row.key[place]);
    for (int lane = 0; lane < kColumnLanes; ++lane)
      held.parts[part][lane] = multiply_add(decayed(place, lane), key, held.parts[part][lane]);
  };
  int64_t i = 0;
  for (; i + kSums <= key_dim; i += kSums)
    for (int part = 0; part < kSums; ++part) add_held(i + part, part);
  for (int part = 0; i + part < key_dim; ++part) add_held(i + part, part);

  Lanes written[kColumnLanes];
  for (int lane = 0; lane < kColumnLanes; ++lane)
    written[lane] = (values[lane] - held.of(lane)) * row.write;
  const auto write = [&](int64_t place, int part) {
    const Lanes key = all(row.key[place]), query = all(row.query[place]);
    for (int lane = 0; lane < kColumnLanes; ++lane) {
      const Lanes changed = multiply_add(key, written[lane], decayed(place, lane));
      store(state.values[place] + lane * kLanes, changed);
      found.parts[part][lane] = multiply_add(changed, query, found.parts[part][lane]);
    }
  };
  for (i = 0; i + kSums <= key_dim; i += kSums)
    for (int part = 0; part < kSums; ++part) write(i + part, part);
  for (int part = 0; i + part < key_dim; ++part) write(i + part, part);
  for (int lane = 0; lane < kColumnLanes; ++lane) read[lane] = found.of(lane);
}

// A head's panels from `first` on, through all spans.
template <bool kDecaysByKey>
void step_panels(const DeltaCall& call, int64_t head, int64_t first) {
  const DeltaRule& rule = *call.rule;
  const int64_t key_dim = rule.key_dim, value_dim = rule.value_dim;
  const int64_t key_head = head / (rule.value_heads / rule.key_heads);
  const int64_t place = (head * rule.panels() + first) * key_dim * kPanel;
  const int64_t num_panels = std::min<int64_t>(kColumnLanes, rule.panels() - first);
  int64_t num[kColumnLanes];  // of values that there are in a panel
  for (int lane = 0; lane < kColumnLanes; ++lane)
    num[lane] = std::clamp<int64_t>(value_dim - (first + lane) * kPanel, 0, kPanel);
  Columns state{};
  for (int64_t index = 0; index < call.num_spans; ++index) {
    const DeltaSpan& span = call.spans[index];
    for (int lane = 0; lane < num_panels; ++lane) {
      const float* panel = span.before + place + lane * key_dim * kPanel;
      for (int64_t i = 0; i < key_dim; ++i)
        store(state.values[i] + lane * kLanes,
              span.before == nullptr ? Lanes{} : load(panel + i * kPanel));
    }
    for (int64_t row = span.first; row < span.first + span.num_rows; ++row) {
      const float* convolved = call.convolved + row * rule.channels();
      const int64_t column = head * value_dim + first * kPanel;
      const RowOfHead own{convolved + key_head * key_dim,
                          convolved + rule.keys() + key_head * key_dim,
                          convolved + 2 * rule.keys() + column,
                          call.decays + (row * rule.value_heads + head) * rule.decays,
                          call.writes[row * rule.value_heads + head]};
      float* to = call.read + row * rule.values() + column;
      Lanes values[kColumnLanes] = {}, read[kColumnLanes];
      for (int lane = 0; lane < num_panels; ++lane)
        values[lane] = num[lane] == kLanes ? load(own.value + lane * kLanes)
                                           : load_some(own.value + lane * kLanes, num[lane]);
      step<kDecaysByKey>(state, own, key_dim, values, read);
      for (int lane = 0; lane < num_panels; ++lane) {
        if (num[lane] == kLanes)
          store(to + lane * kLanes, read[lane]);
        else
          store_some(to + lane * kLanes, read[lane], num[lane]);
      }
    }
    for (int lane = 0; lane < num_panels; ++lane) {
      float* panel = span.after + place + lane * key_dim * kPanel;
      for (int64_t i = 0; i < key_dim; ++i)
        store(panel + i * kPanel, load(state.values[i] + lane * kLanes));
    }
  }
}

// What a head of a row has read, normed, times its gate.
template <typename T>
void norm_head(const DeltaCall& call, int64_t row, int64_t head) {
  const DeltaRule& rule = *call.rule;
  const int64_t size = rule.value_dim;
  float* read = call.read + row * rule.values() + head * size;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(read + i, rounded<T>(load(read + i)));
  if (i < size) store_some(read + i, rounded<T>(load_some(read + i, size - i)), size - i);
  const float factor = inverse_rms(read, size, rule.eps);
  const T* gate = row_of<T>(call.gate, call.gate_stride, row) + head * size;
  T* to = static_cast<T*>(call.output) + row * rule.values() + head * size;
  const auto gated = [&](Lanes x, Lanes weight, Lanes z) {
    const Lanes scaled = x * factor;
    const Lanes normed = rule.rounds_first ? rounded<T>(rounded<T>(scaled) * weight)
                                           : scaled * weight;
    return normed * (rule.gate_is_sigmoid ? sigmoid(z) : silu(z));
  };
  for (i = 0; i + kLanes <= size; i += kLanes)
    store(to + i, gated(load(read + i), load(rule.norm + i), load(gate + i)));
  if (i < size) {
    const int64_t rest = size - i;
    store_some(to + i,
               gated(load_some(read + i, rest), load_some(rule.norm + i, rest),
                     load_some(gate + i, rest)),
               rest);
  }
}

// Shares its work among the threads of the region that calls it.
template <typename T>
void delta(const DeltaCall& call) {
  const DeltaRule& rule = *call.rule;
  constexpr int64_t kPiece = 256;  // channels
  const int64_t channels = rule.channels();
#pragma omp for schedule(static)
  for (int64_t first = 0; first < channels; first += kPiece)
    convolve_channels<T>(call, first, std::min(first + kPiece, channels));
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.num_rows; ++row) prepare_row<T>(call, row);
  const int64_t panels = rule.panels();
#pragma omp for collapse(2) schedule(static)
  for (int64_t head = 0; head < rule.value_heads; ++head) {
    for (int64_t first = 0; first < panels; first += kColumnLanes) {
      if (rule.decays == 1)
        step_panels<false>(call, head, first);
      else
        step_panels<true>(call, head, first);
    }
  }
  if (call.output == nullptr) return;
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < call.num_rows; ++row) {
    for (int64_t head = 0; head < rule.value_heads; ++head) norm_head<T>(call, row, head);
  }
}

}  // namespace blockdraft
