// Products with weights in groups: whole numbers of four or eight bits, and for each output and each
// 32 inputs a scale and perhaps a minimum.
//
// A row is turned into whole numbers too, with a scale for each group. The sums of a group are whole
// numbers, exact in any order; the groups are added up one after another, each step rounded alone.
// So a row's bits do not depend on the rows beside it, and torch has the same.

#pragma once

#include <vector>

#include "int8.h"
#include "product.h"

#if BLOCKDRAFT_HAS_NUMBERS && defined(__F16C__)
#define BLOCKDRAFT_GROUPS 1
#else
#define BLOCKDRAFT_GROUPS 0
#endif

namespace blockdraft {

#if BLOCKDRAFT_GROUPS
constexpr int64_t kGroup = 32;
constexpr int kGroupPanel = 16;
constexpr float kGroupLevels = 32767.0f;  // the largest whole number of a row: it fits int16

// The sums of so many rows just fit the registers: of a group, and with wide ones of all groups too.
constexpr int kGroupRows = BLOCKDRAFT_TWO_REGISTERS ? 6 : 12;

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

// Sixteen numbers in float16.
inline Lanes load_halves(const char* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
#if BLOCKDRAFT_TWO_REGISTERS
  return {(Lanes::Register)_mm256_cvtph_ps(_mm_loadu_si128(halves)),
          (Lanes::Register)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
  return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#endif
}

// The numbers of sixteen outputs for inputs 2 * kPair and 2 * kPair + 1 of a group's four, widened to
// int16. Of four bits, a word of 16 has those of one input for outputs i and 8 + i, and of the second
// input behind it for the same; then come those of the other two.
template <int Bits, int kPair>
Lanes load_numbers(const char* four) {
  if constexpr (Bits == 8) {
    return load_weights(reinterpret_cast<const int8_t*>(four) + kPair * 2 * kGroupPanel);
  } else {
    constexpr int kFirst = 8 * kPair, kSecond = kFirst + 4;  // bits
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(four));
#if BLOCKDRAFT_TWO_REGISTERS
    const __m256i lowest = _mm256_set1_epi16(15);
    return {(Lanes::Register)_mm256_and_si256(_mm256_srli_epi16(words, kFirst), lowest),
            (Lanes::Register)_mm256_and_si256(_mm256_srli_epi16(words, kSecond), lowest)};
#else
    const __m512i bits = _mm512_inserti64x4(_mm512_set1_epi16(kFirst), _mm256_set1_epi16(kSecond), 1);
    return (Lanes)_mm512_and_si512(_mm512_srlv_epi16(_mm512_broadcast_i64x4(words), bits),
                                   _mm512_set1_epi16(15));
#endif
  }
}

// Sums of a group that are kept apart and added at its end. Of few rows each would wait for the one
// before, where products and sums are one instruction.
template <int M>
constexpr int kApart = BLOCKDRAFT_TWO_REGISTERS || M > 4 ? 1 : 2;

// M rows from `row` on with the panel of the outputs from `first` on: their sums, [M, kGroupPanel].
// fetches_next: whether the panel behind it is fetched meanwhile.
template <int M, int Bits, bool HasMinimums>
void multiply_group_panel(const Product& product, float* to, const GroupedRows& rows, int64_t row,
                          int64_t first, bool fetches_next) {
  using Block = GroupBlock<Bits, HasMinimums>;
  constexpr int64_t kFourBytes = 4 * kGroupPanel * Bits / 8;
  const int64_t inputs = product.inputs, num_groups = inputs / kGroup;
  const char* block = static_cast<const char*>(product.weight) +
                      first / kGroupPanel * num_groups * Block::kBytes;
  Lanes totals[M] = {};
  for (int64_t group = 0; group < num_groups; ++group, block += Block::kBytes) {
    if (fetches_next)
      for (int64_t i = 0; i < Block::kBytes; i += kCacheLine)
        __builtin_prefetch(block + num_groups * Block::kBytes + i, 0, 2);
    const int16_t* values = rows.values.data() + row * inputs + group * kGroup;
    const char* numbers_of = block + Block::kNumbers;
    Lanes sums[M][kApart<M>] = {};
    const auto add_pair = [&](int64_t four, auto pair) {
      const Lanes weights = load_numbers<Bits, pair>(numbers_of + four * kFourBytes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        Lanes& own = sums[m][pair % kApart<M>];
        own = multiply_step<int16_t>(spread_word(values + m * inputs + 4 * four + 2 * pair),
                                     weights, own);
      }
    };
    for (int64_t four = 0; four < kGroup / 4; ++four) {
      add_pair(four, std::integral_constant<int, 0>{});
      add_pair(four, std::integral_constant<int, 1>{});
    }
    const Lanes scales = load_halves(block);
    const Lanes minimums = HasMinimums ? load_halves(block + Block::kHalves) : Lanes{};
    const size_t place = static_cast<size_t>(row * num_groups + group);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const size_t own = place + static_cast<size_t>(m * num_groups);
      Lanes sum = sums[m][0];
      if constexpr (kApart<M> == 2) sum = (Lanes)((Ints)sum + (Ints)sums[m][1]);
      totals[m] = totals[m] + numbers(sum) * scales * rows.scales[own];
      if constexpr (HasMinimums) totals[m] = totals[m] + minimums * rows.totals[own];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) store(to + m * kGroupPanel, totals[m]);
}

template <int Bits, bool HasMinimums, typename T>
void multiply_group_panels(const Product& product, T* output, const T* input, int64_t num_rows) {
  const GroupedRows& rows = grouped_rows(input, num_rows, product.inputs);
  const int64_t num_blocks = (num_rows + kGroupRows - 1) / kGroupRows;
  const T* bias = static_cast<const T*>(product.bias);
#pragma omp for schedule(guided)
  for (int64_t first = 0; first < product.outputs; first += kGroupPanel)
    // Blocks of about as many rows: few would cost nearly as much as many.
    for (int64_t index = 0; index < num_blocks; ++index) {
      const int64_t begin = num_rows * index / num_blocks;
      const int64_t end = num_rows * (index + 1) / num_blocks;
      float sums[kGroupRows * kGroupPanel];
      with_constant<kGroupRows>(end - begin, [&](auto num) {
        multiply_group_panel<num, Bits, HasMinimums>(product, sums, rows, begin, first, index == 0);
      });
      for (int64_t row = begin; row < end; ++row)
        put_sums(output + row * product.outputs + first, load(sums + (row - begin) * kGroupPanel),
                 bias == nullptr ? nullptr : bias + first, product.outputs - first);
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
