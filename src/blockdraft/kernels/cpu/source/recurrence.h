// Layers whose memory does not grow: the last inputs of a causal convolution, and in most of them a
// matrix for each head, which every token decays, writes to and reads. What is special to a kind of
// layer is in delta.h, scan.h and short_convolution.h.
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

// Of a layer without matrices there are channels, taps, convolution and its bias.
struct Recurrence {
  int64_t key_heads, value_heads, key_dim, value_dim, channels, taps;
  int64_t decays;            // of a head: one, or one for each of its keys' values
  int64_t norm_size;         // values of a row that share a norm
  const float* convolution;  // [taps, channels]
  const float* convolution_bias;
  const float* decay_rates;   // [value_heads]
  const float* decay_biases;  // [value_heads, decays]
  const float* skips;         // of a scan, [value_heads]
  const float* norm;          // [values]; or none
  float eps;
  float write_scale;           // of a delta rule
  float min_start, max_start;  // of a scan: limits of the first step of a sequence
  int32_t rounds_first;        // the norm, before its weight is applied
  int32_t gates_first;         // or behind the norm
  int32_t gate_is_sigmoid;
  int32_t kind;  // see recurrence.cpp

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t panels() const { return (value_dim + kPanel - 1) / kPanel; }  // of a head
};

// Rows of one sequence. Those of a call run in their order, so that one may go on where another
// one ended. Without a state from before all of it is 0.
struct StateSpan {
  int64_t first, num_rows;
  const void* inputs_before;  // of the convolution, [taps - 1, channels]
  const float* before;        // [value_heads, panels, key_dim, kPanel]
  void* inputs_after;
  float* after;
};

struct RecurrenceCall {
  const Recurrence* rule;
  const void *inputs, *decay, *write, *gate;
  int64_t inputs_stride, decay_stride, write_stride, gate_stride;  // from row to row
  void* output;  // [rows, values], or [rows, channels] without matrices; or none
  // What lies between the parts, of each row.
  float *convolved, *decays, *writes, *read;
  const StateSpan* spans;  // they follow each other from row 0 on, to the last row
  int64_t num_spans, num_rows;
};

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

template <typename T>
const T* row_of(const void* rows, int64_t stride, int64_t row) {
  return static_cast<const T*>(rows) + row * stride;
}

// The input of a convolution `place` rows behind the first one of a span; null before its sequence.
template <typename T>
const T* input_at(const RecurrenceCall& call, const StateSpan& span, int64_t place) {
  if (place >= 0) return row_of<T>(call.inputs, call.inputs_stride, span.first + place);
  const T* before = static_cast<const T*>(span.inputs_before);
  const int64_t held = call.rule->taps - 1;
  return before == nullptr ? nullptr : before + (held + place) * call.rule->channels;
}

// Some channels of the convolution of the rows of a span: put(row, i, sum, num).
template <typename T, typename Put>
void convolve_rows(const RecurrenceCall& call, const StateSpan& span, int64_t begin, int64_t end,
                   const Put& put) {
  const Recurrence& rule = *call.rule;
  const float* bias = rule.convolution_bias;
  for (int64_t row = 0; row < span.num_rows; ++row) {
    const T* inputs[kMaxTaps];
    for (int64_t tap = 0; tap < rule.taps; ++tap)
      inputs[tap] = input_at<T>(call, span, row + tap - (rule.taps - 1));
    in_lanes(begin, end, [&](int64_t i, auto num) {
      Lanes sum = bias == nullptr ? Lanes{} : load_some(bias + i, num);
      for (int64_t tap = 0; tap < rule.taps; ++tap) {
        const Lanes input = inputs[tap] == nullptr ? Lanes{} : load_some(inputs[tap] + i, num);
        sum = multiply_add(input, load_some(rule.convolution + tap * rule.channels + i, num), sum);
      }
      put(span.first + row, i, sum, num);
    });
  }
}

// The same channels of the inputs that the rows behind a span will need.
template <typename T>
void keep_inputs(const RecurrenceCall& call, const StateSpan& span, int64_t begin, int64_t end) {
  const int64_t held = call.rule->taps - 1;
  for (int64_t place = 0; place < held; ++place) {
    const T* from = input_at<T>(call, span, span.num_rows + place - held);
    T* to = static_cast<T*>(span.inputs_after) + place * call.rule->channels;
    if (from == nullptr)
      std::fill(to + begin, to + end, T{});
    else
      std::copy(from + begin, from + end, to + begin);
  }
}

// The convolution of all rows, and what is kept of their inputs. A thread takes some channels.
template <typename T, typename Put>
void convolve(const RecurrenceCall& call, bool reads, const Put& put) {
  constexpr int64_t kPiece = 256;
  const int64_t channels = call.rule->channels;
#pragma omp for schedule(static)
  for (int64_t first = 0; first < channels; first += kPiece) {
    const int64_t end = std::min(first + kPiece, channels);
    for (int64_t index = 0; index < call.num_spans; ++index) {
      if (reads) convolve_rows<T>(call, call.spans[index], first, end, put);
      keep_inputs<T>(call, call.spans[index], first, end);
    }
  }
}

// One value at a time: the library's functions of one value do not look at the others.
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Some panels of the state of a head, beside each other.
struct Columns {
  float values[kMaxKeyDim][kColumnLanes * kLanes];
};

// What a row does to the state of a head.
struct RowOfHead {
  const float *query, *key, *value, *decays;
  float write;  // how much
  float skip;   // how much of the value is read besides
};

// Where a row has queries, keys and values among the channels of its convolution.
struct Places {
  int64_t query, key, value;
};

// Sums over the rows of a state, of each column by itself.
struct Sums {
  Lanes parts[kSums][kColumnLanes];

  Lanes of(int lane) const {
    return (parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane]);
  }
};

// Calls act(i, part) for all rows of a state: which of the sums each is added to.
template <typename Act>
inline void in_parts(int64_t num_rows, const Act& act) {
  int64_t i = 0;
  for (; i + kSums <= num_rows; i += kSums)
    for (int part = 0; part < kSums; ++part) act(i + part, part);
  for (int part = 0; i + part < num_rows; ++part) act(i + part, part);
}

// A head's panels from `first` on, through all spans, with a Kind's `step`: it changes the state
// by a row, and gives what that reads in these columns.
template <typename Kind>
void step_panels(const RecurrenceCall& call, int64_t head, int64_t first) {
  const Recurrence& rule = *call.rule;
  const int64_t key_dim = rule.key_dim, value_dim = rule.value_dim;
  const int64_t key_place = head / (rule.value_heads / rule.key_heads) * key_dim;
  const int64_t column = head * value_dim + first * kPanel;
  const Places places = Kind::places(rule);
  const int64_t place = (head * rule.panels() + first) * key_dim * kPanel;
  const int64_t num_panels = std::min<int64_t>(kColumnLanes, rule.panels() - first);
  int64_t num[kColumnLanes];  // of values that there are in a panel
  for (int lane = 0; lane < kColumnLanes; ++lane)
    num[lane] = std::clamp<int64_t>(value_dim - (first + lane) * kPanel, 0, kPanel);
  Columns state{};
  for (int64_t index = 0; index < call.num_spans; ++index) {
    const StateSpan& span = call.spans[index];
    for (int lane = 0; lane < num_panels; ++lane) {
      const float* panel = span.before + place + lane * key_dim * kPanel;
      for (int64_t i = 0; i < key_dim; ++i)
        store(state.values[i] + lane * kLanes,
              span.before == nullptr ? Lanes{} : load(panel + i * kPanel));
    }
    for (int64_t row = span.first; row < span.first + span.num_rows; ++row) {
      const float* convolved = call.convolved + row * rule.channels;
      const RowOfHead own{convolved + places.query + key_place,
                          convolved + places.key + key_place,
                          convolved + places.value + column,
                          call.decays + (row * rule.value_heads + head) * rule.decays,
                          call.writes[row * rule.value_heads + head],
                          rule.skips == nullptr ? 0.0f : rule.skips[head]};
      float* to = call.read + row * rule.values() + column;
      Lanes values[kColumnLanes] = {}, read[kColumnLanes];
      for (int lane = 0; lane < num_panels; ++lane)
        values[lane] = num[lane] == kLanes ? load(own.value + lane * kLanes)
                                           : load_some(own.value + lane * kLanes, num[lane]);
      Kind::step(state, own, key_dim, values, read);
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

// What some values of a row have read, normed together, times their gates before or after it.
template <typename T>
void norm_group(const RecurrenceCall& call, int64_t row, int64_t first) {
  const Recurrence& rule = *call.rule;
  const int64_t size = rule.norm_size;
  float* read = call.read + row * rule.values() + first;
  const T* gate = row_of<T>(call.gate, call.gate_stride, row) + first;
  T* to = static_cast<T*>(call.output) + row * rule.values() + first;
  if (rule.norm == nullptr) {
    in_lanes(0, size, [&](int64_t i, auto num) {
      const Lanes opened = rounded<T>(silu(load_some(gate + i, num)));
      store_some(to + i, rounded<T>(load_some(read + i, num)) * opened, num);
    });
    return;
  }
  const auto opened = [&](int64_t i, auto num) {
    const Lanes z = load_some(gate + i, num);
    return rule.gate_is_sigmoid ? sigmoid(z) : silu(z);
  };
  in_lanes(0, size, [&](int64_t i, auto num) {
    const Lanes x = rounded<T>(load_some(read + i, num));
    store_some(read + i, rule.gates_first ? x * opened(i, num) : x, num);
  });
  const float factor = inverse_rms(read, size, rule.eps);
  in_lanes(0, size, [&](int64_t i, auto num) {
    const Lanes scaled = load_some(read + i, num) * factor;
    const Lanes weight = load_some(rule.norm + first + i, num);
    const Lanes normed = rule.rounds_first ? rounded<T>(rounded<T>(scaled) * weight)
                                           : scaled * weight;
    store_some(to + i, rule.gates_first ? normed : normed * opened(i, num), num);
  });
}

// Whether a row is the first one of its sequence.
inline bool begins_sequence(const RecurrenceCall& call, int64_t row) {
  for (int64_t index = 0; index < call.num_spans; ++index)
    if (call.spans[index].first == row) return call.spans[index].before == nullptr;
  return false;
}

// A layer with matrices. Shares its work among the threads of the region that calls it.
template <typename T, typename Kind>
void recur(const RecurrenceCall& call) {
  const Recurrence& rule = *call.rule;
  convolve<T>(call, true, [&](int64_t row, int64_t i, Lanes sum, auto num) {
    store_some(call.convolved + row * rule.channels + i, rounded<T>(silu(rounded<T>(sum))), num);
  });
#pragma omp for schedule(static)
  for (int64_t row = 0; row < call.num_rows; ++row)
    Kind::prepare_row(call, row, begins_sequence(call, row));
  const int64_t panels = rule.panels();
#pragma omp for collapse(2) schedule(static)
  for (int64_t head = 0; head < rule.value_heads; ++head)
    for (int64_t first = 0; first < panels; first += kColumnLanes)
      step_panels<Kind>(call, head, first);
  if (call.output == nullptr) return;
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t first = 0; first < rule.values(); first += rule.norm_size)
      norm_group<T>(call, row, first);
}

}  // namespace blockdraft
