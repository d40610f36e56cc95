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

// M rows with one panel of a weight. Loops over sums are unrolled, or they would not stay in
// registers.
template <typename T, int M>
void multiply_panel(T* output, const T* rows, const T* panel, const T* bias, const Product& product,
                    int64_t num_outputs) {
  Lanes sums[M][kPanelLanes] = {};
  for (int64_t input = 0; input < product.inputs; input += kStep<T>) {
    Lanes weights[kPanelLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kPanelLanes; ++i)
      weights[i] = load_words(panel + input * kPanel + i * kLanes * kStep<T>);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const Lanes value = spread_word(rows + m * product.inputs + input);
#pragma GCC unroll 8
      for (int i = 0; i < kPanelLanes; ++i)
        sums[m][i] = multiply_step<T>(value, weights[i], sums[m][i]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int i = 0; i < kPanelLanes; ++i)
      put_sums(output + m * product.outputs + i * kLanes, sums[m][i],
             bias == nullptr ? nullptr : bias + i * kLanes, num_outputs - i * kLanes);
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
      with_constant<kMaxRows>(end - begin, [&](auto num) {
        multiply_panel<T, num>(static_cast<T*>(output) + begin * product.outputs + first,
                               static_cast<const T*>(input) + begin * product.inputs, panel,
                               bias == nullptr ? nullptr : bias + first, product,
                               rest < kPanel ? rest : kPanel);
      });
    }
  }
}

}  // namespace blockdraft
