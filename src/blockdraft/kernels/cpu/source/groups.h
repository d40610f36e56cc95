// Products with weights in groups: whole numbers of four or eight bits, and for each output and each
// 32 inputs a scale and perhaps a minimum.
//
// A row is turned into whole numbers too, with a scale for each group. The sums of a group are whole
// numbers, exact in any order; the groups are added up one after another, each step rounded alone.
// So a row's bits do not depend on the rows beside it, and torch has the same.
//
// AVX2 is enough, also in builds with wider registers.

#pragma once

#include <vector>

#include "product.h"

#if defined(__AVX2__) && defined(__F16C__)
#define BLOCKDRAFT_GROUPS 1
#else
#define BLOCKDRAFT_GROUPS 0
#endif

namespace blockdraft {

#if BLOCKDRAFT_GROUPS
constexpr int64_t kGroup = 32;
constexpr int kGroupPanel = 16;
constexpr float kGroupLevels = 32767.0f;  // the largest whole number of a row: it fits int16

// With weights and a value of a row, the sums of so many rows just fit the registers.
constexpr int kGroupRows = 6;
// From so many rows on, the next panel is fetched while this one is computed.
constexpr int kGroupFetchRows = 3;

struct GroupedRows {
  std::vector<int16_t> values;  // [rows, inputs]
  std::vector<float> scales;    // [rows, groups]
  std::vector<float> totals;    // the same: the sum of the group's numbers, times the scale
};

inline __m256 eight_values(const float* from) { return _mm256_loadu_ps(from); }

inline __m256 eight_values(const BFloat16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline int32_t largest_int(__m256i x) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
}

inline int32_t sum_int(__m256i x) {
  __m128i all = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  all = _mm_add_epi32(all, _mm_shuffle_epi32(all, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(all, _mm_shuffle_epi32(all, 0xb1)));
}

// The numbers of 32 values. The scale is NaN if one of them is no finite number, and 0 if all are
// next to nothing.
template <typename T>
void whole_group(const T* from, int16_t* to, float* scale, float* total) {
  constexpr float kSmallest = 1e-30f;  // the factor of a smaller one would be infinite
  constexpr int32_t kInfinite = 0x7f800000;
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
  __m256 values[4];
  __m256i sizes = _mm256_setzero_si256();  // of values without their sign, in order as integers are
  for (int i = 0; i < 4; ++i) {
    values[i] = eight_values(from + 8 * i);
    sizes = _mm256_max_epi32(sizes, _mm256_and_si256(_mm256_castps_si256(values[i]), no_sign));
  }
  const int32_t bits = largest_int(sizes);
  float top;
  std::memcpy(&top, &bits, sizeof top);
  if (bits >= kInfinite || !(top > kSmallest)) {
    std::memset(to, 0, kGroup * sizeof *to);
    *scale = *total = bits >= kInfinite ? NAN : 0.0f;
    return;
  }
  const __m256 factor = _mm256_set1_ps(kGroupLevels / top);
  __m256i sums = _mm256_setzero_si256();
  for (int i = 0; i < 4; i += 2) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], factor));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(values[i + 1], factor));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * i), packed);
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(packed, _mm256_set1_epi16(1)));
  }
  *scale = top / kGroupLevels;
  *total = static_cast<float>(sum_int(sums)) * *scale;
}

// Of rows [num_rows, size], valid until the thread calls again.
template <typename T>
const GroupedRows& grouped_rows(const T* rows, int64_t num_rows, int64_t size) {
  thread_local GroupedRows kept;
  const int64_t num_groups = num_rows * size / kGroup;
  if (static_cast<int64_t>(kept.scales.size()) < num_groups) {
    kept.values.resize(static_cast<size_t>(num_groups * kGroup));
    kept.scales.resize(static_cast<size_t>(num_groups));
    kept.totals.resize(static_cast<size_t>(num_groups));
  }
  for (int64_t i = 0; i < num_groups; ++i)
    whole_group(rows + i * kGroup, kept.values.data() + i * kGroup, kept.scales.data() + i,
                kept.totals.data() + i);
  return kept;
}

// Where a panel has what belongs to one group of sixteen outputs: their scales and minimums in
// float16, then their numbers.
template <int Bits, bool HasMinimums>
struct GroupBlock {
  static constexpr int64_t kHalves = kGroupPanel * 2;
  static constexpr int64_t kNumbers = HasMinimums ? 2 * kHalves : kHalves;
  static constexpr int64_t kBytes = kNumbers + kGroup * kGroupPanel * Bits / 8;
};

inline __m256 eight_halves(const char* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// The weights of sixteen outputs for two inputs, widened to int16, from eight bits.
inline void widen(const char* from, __m256i weights[2]) {
  for (int i = 0; i < 2; ++i)
    weights[i] = _mm256_cvtepi8_epi16(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
}

// c + a * b by pairs. Left alone, compilers make all products of a step first, and have no registers
// for the sums.
inline __m256i add_number_pairs(__m256i a, __m256i b, __m256i c) {
  asm volatile("vpaddd %1, %0, %0" : "+x"(c) : "x"(_mm256_madd_epi16(a, b)));
  return c;
}

// M rows with the two inputs whose weights are given. Out of line the sums would lie in memory.
template <int M>
__attribute__((always_inline)) inline void add_step(const int16_t* rows, int64_t inputs, const __m256i weights[2], __m256i sums[M][2]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    int32_t pair;
    std::memcpy(&pair, rows + m * inputs, sizeof pair);
    const __m256i value = _mm256_set1_epi32(pair);
    sums[m][0] = add_number_pairs(value, weights[0], sums[m][0]);
    sums[m][1] = add_number_pairs(value, weights[1], sums[m][1]);
  }
}

// M rows with the numbers of a group. Of four bits, a word has those of one input for outputs i and
// 8 + i, and of the second input behind it for the same.
template <int M, int Bits>
__attribute__((always_inline)) inline void add_group(const int16_t* rows, int64_t inputs, const char* numbers, __m256i sums[M][2]) {
  if constexpr (Bits == 8) {
    for (int64_t input = 0; input < kGroup; input += 2) {
      __m256i weights[2];
      widen(numbers + input * kGroupPanel, weights);
      add_step<M>(rows + input, inputs, weights, sums);
    }
  } else {
    const __m256i lowest = _mm256_set1_epi16(15);
    for (int64_t input = 0; input < kGroup; input += 4) {
      const __m256i four = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(numbers + input * kGroupPanel / 2));
      const __m256i first[2] = {_mm256_and_si256(four, lowest),
                                _mm256_and_si256(_mm256_srli_epi16(four, 4), lowest)};
      add_step<M>(rows + input, inputs, first, sums);
      const __m256i second[2] = {_mm256_and_si256(_mm256_srli_epi16(four, 8), lowest),
                                 _mm256_srli_epi16(four, 12)};
      add_step<M>(rows + input + 2, inputs, second, sums);
    }
  }
}

// M rows from `row` on with the panel of the outputs from `first` on.
template <int M, int Bits, bool HasMinimums, typename T>
void multiply_group_panel(const Product& product, T* output, const GroupedRows& rows, int64_t row,
                          int64_t first, bool fetches) {
  using Block = GroupBlock<Bits, HasMinimums>;
  const int64_t inputs = product.inputs, num_groups = inputs / kGroup;
  const char* block = static_cast<const char*>(product.weight) +
                      first / kGroupPanel * num_groups * Block::kBytes;
  float totals[M][kGroupPanel] = {};
  for (int64_t group = 0; group < num_groups; ++group, block += Block::kBytes) {
    if (fetches)
      for (int64_t i = 0; i < Block::kBytes; i += 64)
        __builtin_prefetch(block + num_groups * Block::kBytes + i, 0, 2);
    __m256i sums[M][2];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    add_group<M, Bits>(rows.values.data() + row * inputs + group * kGroup, inputs,
                       block + Block::kNumbers, sums);
    const size_t place = static_cast<size_t>(row * num_groups + group);
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      const __m256 scales = eight_halves(block + 16 * i);
      const __m256 minimums =
          HasMinimums ? eight_halves(block + Block::kHalves + 16 * i) : _mm256_setzero_ps();
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const size_t own = place + static_cast<size_t>(m * num_groups);
        __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[m][i]), scales);
        sum = _mm256_mul_ps(sum, _mm256_set1_ps(rows.scales[own]));
        sum = _mm256_add_ps(_mm256_loadu_ps(totals[m] + 8 * i), sum);
        if constexpr (HasMinimums)
          sum = _mm256_add_ps(sum, _mm256_mul_ps(minimums, _mm256_set1_ps(rows.totals[own])));
        _mm256_storeu_ps(totals[m] + 8 * i, sum);
      }
    }
  }
  const T* bias = static_cast<const T*>(product.bias);
  for (int m = 0; m < M; ++m)
    put_sums(output + (row + m) * product.outputs + first, load(totals[m]),
             bias == nullptr ? nullptr : bias + first, product.outputs - first);
}

template <int Bits, bool HasMinimums, typename T>
void multiply_group_panels(const Product& product, T* output, const T* input, int64_t num_rows) {
  const GroupedRows& rows = grouped_rows(input, num_rows, product.inputs);
  const int64_t num_blocks = (num_rows + kGroupRows - 1) / kGroupRows;
#pragma omp for schedule(guided)
  for (int64_t first = 0; first < product.outputs; first += kGroupPanel)
    // Blocks of about as many rows: few would cost nearly as much as many.
    for (int64_t index = 0; index < num_blocks; ++index) {
      const int64_t begin = num_rows * index / num_blocks;
      const int64_t end = num_rows * (index + 1) / num_blocks;
      with_constant<kGroupRows>(end - begin, [&](auto num) {
        multiply_group_panel<num, Bits, HasMinimums>(product, output, rows, begin, first,
                                                     num_rows >= kGroupFetchRows && index == 0);
      });
    }
}

// Every thread makes whole numbers of all rows for itself, as for int8 weights.
template <typename T>
void multiply_groups(const Product& product, T* output, const T* input, int64_t num_rows) {
  const bool is_narrow = product.group_bits == 4;
  if (is_narrow && product.has_minimums)
    multiply_group_panels<4, true>(product, output, input, num_rows);
  else if (is_narrow)
    multiply_group_panels<4, false>(product, output, input, num_rows);
  else if (product.has_minimums)
    multiply_group_panels<8, true>(product, output, input, num_rows);
  else
    multiply_group_panels<8, false>(product, output, input, num_rows);
}
#endif

}  // namespace blockdraft
