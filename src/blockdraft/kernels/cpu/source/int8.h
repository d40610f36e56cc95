// Rows as whole numbers, for products with int8 weights.
//
// Products and sums of whole numbers are exact in any order. So a row is divided by a scale of its
// own, and the product multiplied by it and by the scale of the output.

#pragma once

#include <limits>
#include <vector>

#include "lanes.h"

namespace blockdraft {

#if BLOCKDRAFT_HAS_NUMBERS
constexpr int64_t kMaxInt8 = 127;

// The weights of sixteen outputs for two inputs, widened to int16.
inline Lanes load_weights(const int8_t* from) {
#if BLOCKDRAFT_TWO_REGISTERS
  const auto eight = [&](int first) {
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * first));
    return (Lanes::Register)_mm256_cvtepi8_epi16(pairs);
  };
  return {eight(0), eight(8)};
#else
  return (Lanes)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
}

struct WholeRows {
  std::vector<int16_t> values;
  std::vector<float> scales;
};

// The largest number of a row, such that no sum of so many products with int8 leaves int32.
inline int64_t num_levels(int64_t inputs) {
  const int64_t most = std::numeric_limits<int32_t>::max() / (kMaxInt8 * inputs);
  constexpr int64_t kMax = std::numeric_limits<int16_t>::max();
  return most < kMax ? most : kMax;
}

// Returns the scale: NaN if the row holds what is no finite number, 0 if it is next to nothing.
template <typename T>
float whole_row(int16_t* to, const T* row, int64_t size) {
  constexpr float kSmallest = 1e-30f;  // the factor of a smaller one would be infinite
  Lanes sizes{}, zeros{};
  const auto see = [&](Lanes x) {
    sizes = largest(sizes, largest(x, -x));
    zeros = multiply_add(x, Lanes{}, zeros);  // NaN from what is not finite
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) see(load(row + i));
  if (i < size) see(load_some(row + i, size - i));
  const float top = largest(sizes), broken = sum(zeros);
  if (broken != 0.0f || !(top > kSmallest)) {
    std::memset(to, 0, static_cast<size_t>(size) * sizeof *to);
    return broken;
  }
  const float levels = static_cast<float>(num_levels(size)), factor = levels / top;
  for (i = 0; i + kLanes <= size; i += kLanes) store_rounded(to + i, load(row + i) * factor);
  if (i < size) {
    int16_t rest[kLanes];
    store_rounded(rest, load_some(row + i, size - i) * factor);
    std::memcpy(to + i, rest, static_cast<size_t>(size - i) * sizeof *to);
  }
  return top / levels;
}

// Of rows [num_rows, size], valid until the thread calls again.
template <typename T>
const WholeRows& whole_rows(const T* rows, int64_t num_rows, int64_t size) {
  thread_local WholeRows kept;
  if (static_cast<int64_t>(kept.values.size()) < num_rows * size)
    kept.values.resize(static_cast<size_t>(num_rows * size));
  if (static_cast<int64_t>(kept.scales.size()) < num_rows)
    kept.scales.resize(static_cast<size_t>(num_rows));
  for (int64_t row = 0; row < num_rows; ++row)
    kept.scales[static_cast<size_t>(row)] =
        whole_row(kept.values.data() + row * size, rows + row * size, size);
  return kept;
}
#endif

}  // namespace blockdraft
