// Products of rows with a weight, the sums of every output in the order of the inputs.
//
// A weight lies in panels of 48 outputs. In a panel come the inputs one after another (bfloat16: two
// by two), each with the weights of all outputs of the panel, so that a product reads it front to
// back. What fills up the last panel is 0. The sums of a row are the same whatever rows share a
// call and however many threads.

#pragma once

#include "lanes.h"

namespace blockdraft {

constexpr int kPanelLanes = 3;
constexpr int64_t kPanel = kPanelLanes * kLanes;
// With the weights and a value of a row, their sums just fit the registers.
constexpr int kMaxRows = 8;

struct Product {
  const void* weight;
  const void* bias;  // [outputs] or null
  int64_t inputs;
  int64_t outputs;
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

// The inputs that one step of a sum takes.
template <typename T>
constexpr int64_t kStep = 1;
template <>
constexpr int64_t kStep<BFloat16> = kHasPairs ? 2 : 1;

inline float as_float(float x) { return x; }
inline float as_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The weights of a panel for one step of a sum.
template <typename T>
struct Step {
  Lanes weights[kPanelLanes];

  explicit Step(const T* from) {
    for (int i = 0; i < kPanelLanes; ++i) weights[i] = load(from + i * kLanes);
  }

  void add(Lanes sums[kPanelLanes], const T* values) const {
    const Lanes value = all(as_float(*values));
#pragma GCC unroll 8
    for (int i = 0; i < kPanelLanes; ++i) sums[i] = multiply_add(value, weights[i], sums[i]);
  }
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)
template <>
struct Step<BFloat16> {
  __m512bh weights[kPanelLanes];

  explicit Step(const BFloat16* from) { std::memcpy(weights, from, sizeof weights); }

  void add(Lanes sums[kPanelLanes], const BFloat16* values) const {
    int32_t pair;
    std::memcpy(&pair, values, sizeof pair);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
    for (int i = 0; i < kPanelLanes; ++i)
      sums[i] = (Lanes)_mm512_dpbf16_ps((__m512)sums[i], both, weights[i]);
  }
};
#endif

// Up to 16 outputs of a row; none if `num_outputs` is not positive.
template <typename T>
void finish(T* to, Lanes sum, const T* bias, int64_t num_outputs) {
  if (num_outputs <= 0) return;
  const bool is_whole = num_outputs >= kLanes;
  if (bias != nullptr) sum = sum + (is_whole ? load(bias) : load_some(bias, num_outputs));
  if (is_whole)
    store(to, sum);
  else
    store_some(to, sum, num_outputs);
}

// M rows with one panel of a weight. Loops over sums are unrolled, or they would not stay in
// registers.
template <typename T, int M>
void multiply_panel(T* output, const T* rows, const T* panel, const T* bias, const Product& product,
                    int64_t num_outputs) {
  Lanes sums[M][kPanelLanes] = {};
  for (int64_t input = 0; input < product.inputs; input += kStep<T>) {
    const Step<T> step(panel + input * kPanel);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) step.add(sums[m], rows + m * product.inputs + input);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < kPanelLanes; ++i)
      finish(output + m * product.outputs + i * kLanes, sums[m][i],
             bias == nullptr ? nullptr : bias + i * kLanes, num_outputs - i * kLanes);
}

template <typename T, int M = kMaxRows>
void multiply_some(T* output, const T* rows, const T* panel, const T* bias, const Product& product,
                   int64_t num_outputs, int64_t num_rows) {
  if (num_rows == M)
    multiply_panel<T, M>(output, rows, panel, bias, product, num_outputs);
  else if constexpr (M > 1)
    multiply_some<T, M - 1>(output, rows, panel, bias, product, num_outputs, num_rows);
}

// Shares its panels among the threads of the region that calls it.
template <typename T>
void multiply(const Product& product, void* output, const void* input, int64_t num_rows) {
  const int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
#pragma omp for schedule(static)
  for (int64_t index = 0; index < num_panels; ++index) {
    const int64_t first = index * kPanel;
    const int64_t rest = product.outputs - first;
    const T* panel = static_cast<const T*>(product.weight) + first * product.inputs;
    const T* bias = static_cast<const T*>(product.bias);
    // Blocks of about as many rows: few would cost nearly as much as many.
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t begin = num_rows * block / num_blocks;
      const int64_t end = num_rows * (block + 1) / num_blocks;
      multiply_some<T>(static_cast<T*>(output) + begin * product.outputs + first,
                       static_cast<const T*>(input) + begin * product.inputs, panel,
                       bias == nullptr ? nullptr : bias + first, product,
                       rest < kPanel ? rest : kPanel, end - begin);
    }
  }
}

}  // namespace blockdraft
