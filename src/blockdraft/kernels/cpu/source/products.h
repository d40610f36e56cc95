// Products of rows with a weight, the sums of every output in the order of the inputs.
//
// A weight lies in panels of a few outputs. In a panel come the inputs one after another (bfloat16
// and int8: two by two), each with the weights of all outputs of the panel, so that a product reads
// it front to back. What fills up the last panel is 0. The sums of a row are the same whatever rows share a
// call and however many threads.

#pragma once

#include <algorithm>
#include <vector>

#include "fetching.h"
#include "groups.h"
#include "int8.h"
#include "matrices.h"
#include "product.h"
#include "rows.h"

namespace blockdraft {

// With the weights and a value of a row, the sums of so many rows just fit the registers.
#if BLOCKDRAFT_TWO_REGISTERS
constexpr int kPanelLanes = 1;
constexpr int kMaxRows = 6;
// Panels for few rows: their sums alone would wait for each other.
constexpr int kPanelsAtOnce = 3;
// Whether float32 weights may be held as Narrow.
constexpr bool kReadsNarrow = true;
#else
constexpr int kPanelLanes = 3;
constexpr int kMaxRows = 9;
constexpr int kPanelsAtOnce = 1;
constexpr bool kReadsNarrow = false;
#endif
constexpr int64_t kPanel = kPanelLanes * kLanes;
// Of several blocks, each fetches its share of the next panel, or memory would rest while all but the
// first are multiplied. In matrix registers more blocks than this are bound by arithmetic.
constexpr int64_t kFetchingBlocks = 8;

// The upper half of a float32 weight whose lower half is 0. In memory the first eight of sixteen
// outputs alternate with the last eight, so that a 32-bit word has one of each.
struct Narrow {
  uint16_t bits;
};

// The multiplications of a step over the inputs, one behind another: for rows of float32, weights that
// lie in pairs are taken apart.
template <typename W, typename T>
constexpr int kParts = std::is_same_v<W, BFloat16> && std::is_same_v<T, float> ? 2 : 1;

// The inputs of a step, and so those that lie side by side in a panel.
template <typename W, typename T>
constexpr int64_t kInputs = kStep<T> * kParts<W, T>;

// The weights of sixteen outputs for one step over the inputs of T.
template <typename T>
Lanes load_weights(const T* from) {
  return load_words(from);
}

#if BLOCKDRAFT_TWO_REGISTERS
inline Lanes load_weights(const Narrow* from) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {(Lanes::Register)_mm256_slli_epi32(words, 16),
          (Lanes::Register)_mm256_and_si256(words, _mm256_set1_epi32(-0x10000))};
}
#endif

// The weights of sixteen outputs for one part of a step.
template <typename T, int kPart, typename W>
Lanes load_part(const W* from) {
#if BLOCKDRAFT_SPLITS_PAIRS
  if constexpr (kParts<W, T> == 2) return load_of_pairs<kPart>(from);
#endif
  return load_weights(from);
}

// The rows of a product and what their sums mean: value(sums of sixteen outputs, row, first output).
template <typename T, typename Value>
struct Operand {
  const T* rows;
  Value value;
};

// What is fetched beside a product: from where, and how many bytes with each step over the inputs.
struct Fetched {
  const char* from;
  int64_t bytes;
};

// Bytes of a panel that a step over the inputs reads.
template <typename W, typename T>
constexpr int64_t kRead = kPanel * kInputs<W, T> * static_cast<int64_t>(sizeof(W));

// M rows from `row` on with P panels from the output `first` on, of a weight held as W. Loops over
// sums are unrolled as a whole, or they would not stay in registers. L: FetchedLines.
template <int M, int P, typename L, typename W, typename O, typename T, typename Value>
void multiply_panels(const Product& product, O* output, const Operand<T, Value>& operand, int64_t row,
                     int64_t first, Fetched fetched) {
  constexpr int kSums = P * kPanelLanes;
  const T* rows = operand.rows + row * product.inputs;
  const W* panels = static_cast<const W*>(product.weight) + first * product.inputs;
  Lanes sums[M][kSums] = {};
  const auto add_part = [&](int64_t input, auto part) {
    Lanes weights[kSums];
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i)
      weights[i] = load_part<T, part>(panels + i / kPanelLanes * kPanel * product.inputs +
                                      input * kPanel + i % kPanelLanes * kLanes * kInputs<W, T>);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Lanes value = spread_word(rows + m * product.inputs + input + part);
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) sums[m][i] = add_step<T>(value, weights[i], sums[m][i]);
    }
  };
  for (int64_t input = 0; input < product.inputs; input += kInputs<W, T>) {
    L::fetch(fetched.from);
    fetched.from += fetched.bytes;
    add_part(input, std::integral_constant<int, 0>{});
    if constexpr (kParts<W, T> == 2) add_part(input, std::integral_constant<int, 1>{});
  }
  const O* bias = static_cast<const O*>(product.bias);
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int i = 0; i < kSums; ++i) {
      const int64_t place = first + i * kLanes;
      put_sums(output + (row + m) * product.outputs + place,
               operand.value(sums[m][i], row + m, place), bias == nullptr ? nullptr : bias + place,
               product.outputs - place);
    }
}

// All rows with P panels from number `index` on.
template <int P, typename W, typename O, typename T, typename Value>
void multiply_rows(const Product& product, O* output, const Operand<T, Value>& operand,
                   int64_t num_rows, int64_t index) {
  constexpr int kMost = kMaxRows / P;
  const int64_t num_blocks = (num_rows + kMost - 1) / kMost;
  const int64_t first = index * kPanel;
  // Blocks of about as many rows: few would cost nearly as much as many.
  const auto multiply_block = [&](int64_t block, auto lines, Fetched fetched) {
    const int64_t begin = num_rows * block / num_blocks;
    const int64_t end = num_rows * (block + 1) / num_blocks;
    with_constant<kMost>(end - begin, [&](auto num) {
      multiply_panels<num, P, decltype(lines), W>(product, output, operand, begin, first, fetched);
    });
  };
  constexpr int64_t kBytes = kRead<W, T>;
  const char* panel = reinterpret_cast<const char*>(static_cast<const W*>(product.weight) +
                                                    first * product.inputs);
  const int64_t num_steps = product.inputs / kInputs<W, T>;
  const int64_t bytes = (kBytes + num_blocks - 1) / num_blocks;
  const auto fetch_ahead = [&](auto lines, int64_t ahead) {
    multiply_block(0, lines, Fetched{panel + ahead, kBytes});
  };
  constexpr int kAll = num_lines(kBytes), kHalf = num_lines(kBytes / 2), kThird = num_lines(kBytes / 3);
  if (num_blocks == 1 && P == 1) {
    // The caches may hold it still; on Intel's processors this was not tried.
    if (is_on_amd() && product.is_read_again != 0)
      return fetch_ahead(FetchedLines<kAll, Into::kFirst>{}, kFetchedAhead);
    if (fetches_past_caches())
      return fetch_ahead(FetchedLines<kAll, Into::kNone>{}, kFetchedAhead);
    return fetch_ahead(FetchedLines<kAll, Into::kBoth>{}, kWindow);
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
    const Fetched of_next{panel + num_steps * (kBytes + block * bytes), bytes};
    if (P > 1)
      multiply_block(block, FetchedLines<0, Into::kSecond>{}, of_next);
    else if (num_blocks == 2 && !is_on_amd())
      multiply_block(block, FetchedLines<kHalf, Into::kTurns>{}, of_next);
    else if (num_blocks == 2)
      multiply_block(block, FetchedLines<kHalf, Into::kSecond>{}, of_next);
    else
      multiply_block(block, FetchedLines<kThird, Into::kSecond>{}, of_next);
  }
}

template <typename W, typename O, typename T, typename Value>
void multiply_held(const Product& product, O* output, const Operand<T, Value>& operand,
                   int64_t num_rows) {
  const int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  const int64_t at_once = num_rows * kPanelsAtOnce <= kMaxRows ? kPanelsAtOnce : 1;
  // Who is done sooner takes more: a core whose other half works for somebody else is slower.
#pragma omp for schedule(guided)
  for (int64_t index = 0; index < num_panels; index += at_once) {
    if (at_once > 1 && index + at_once <= num_panels) {
      multiply_rows<kPanelsAtOnce, W>(product, output, operand, num_rows, index);
    } else {
      const int64_t end = index + at_once < num_panels ? index + at_once : num_panels;
      for (int64_t i = index; i < end; ++i)
        multiply_rows<1, W>(product, output, operand, num_rows, i);
    }
  }
}

#if BLOCKDRAFT_HAS_NUMBERS
// With int8 weights. Every thread makes whole numbers of all rows for itself: of a few rows that
// takes less time than threads that wait for each other.
template <typename T>
void multiply_int8(const Product& product, T* output, const T* input, int64_t num_rows) {
  const WholeRows& rows = whole_rows(input, num_rows, product.inputs);
  const auto value = [&](Lanes sum, int64_t row, int64_t place) {
    return numbers(sum) * load(product.scales + place) * rows.scales[static_cast<size_t>(row)];
  };
  multiply_held<int8_t>(product, output, Operand<int16_t, decltype(value)>{rows.values.data(), value},
                        num_rows);
}
#endif

#if BLOCKDRAFT_SPLITS_PAIRS
// More rows are multiplied piece by piece, or a long prompt would keep as many values in memory.
constexpr int64_t kMostWidened = 512;

// Every thread widens all rows of a piece for itself, as for int8 weights.
template <typename Value>
void multiply_split(const Product& product, BFloat16* output, const BFloat16* rows,
                    const Value& value, int64_t num_rows) {
  thread_local std::vector<float> kept;
  const int64_t inputs = product.inputs, num_kept = std::min(num_rows, kMostWidened) * inputs;
  if (static_cast<int64_t>(kept.size()) < num_kept) kept.resize(static_cast<size_t>(num_kept));
  for (int64_t first = 0; first < num_rows; first += kMostWidened) {
    const int64_t num = std::min(num_rows - first, kMostWidened);
    widen_row(kept.data(), rows + first * inputs, num * inputs);
    multiply_held<BFloat16>(product, output + first * product.outputs,
                            Operand<float, Value>{kept.data(), value}, num);
  }
}
#endif

#if BLOCKDRAFT_HAS_MATRICES
static_assert(kPanel == kMatrixOutputs && kStep<BFloat16> == 2, "panels are laid out for others");

// Puts out a row's sums of the panel whose first output is `first`.
inline void put_panel(const Product& product, BFloat16* output, int64_t row, const float* sums,
                      int64_t first) {
  const BFloat16* bias = static_cast<const BFloat16*>(product.bias);
  for (int64_t place = first; place < first + kPanel; place += kLanes)
    put_sums(output + row * product.outputs + place, load(sums + place - first),
             bias == nullptr ? nullptr : bias + place, product.outputs - place);
}

// In matrix registers, whatever the number of rows: their sums round otherwise than those of lanes.
inline void multiply_in_matrices(const Product& product, BFloat16* output, const BFloat16* input,
                                 int64_t num_rows) {
  const int64_t num_panels = (product.outputs + kPanel - 1) / kPanel;
  const int64_t num_blocks = (num_rows + kMatrixRows - 1) / kMatrixRows;
  const int64_t block_rows = (num_rows + num_blocks - 1) / num_blocks;
  const int64_t panel_bytes = product.inputs / 2 * kPairBytes;
  const int64_t num_passes = (num_blocks + 1) / 2;  // over a panel, each for two blocks
  const MatrixRegisters registers(block_rows);
  // Some rows of the last block but one may be made again, with the same bits.
  const auto begin_of = [&](int64_t block) {
    return std::min(block * block_rows, num_rows - block_rows);
  };
#pragma omp for schedule(guided)
  for (int64_t index = 0; index < num_panels; ++index) {
    const char* panel = static_cast<const char*>(product.weight) + index * panel_bytes;
    for (int64_t pass = 0; pass < num_passes; ++pass) {
      Fetched fetched{panel + kFetchedAhead, kStepBytes};
      if (num_passes > kFetchingBlocks)
        fetched.bytes = 0;
      else if (num_passes > 1)
        fetched = {panel + panel_bytes + pass * panel_bytes / num_passes, kStepBytes / num_passes};
      const auto fetch = [&] {
        for (int64_t byte = 0; byte < fetched.bytes; byte += kCacheLine)
          __builtin_prefetch(fetched.from + byte);
        fetched.from += fetched.bytes;
      };
      const int64_t block = 2 * pass, num = std::min<int64_t>(2, num_blocks - block);
      const int64_t begins[2] = {begin_of(block), begin_of(block + num - 1)};
      const BFloat16* const blocks[2] = {input + begins[0] * product.inputs,
                                         input + begins[1] * product.inputs};
      alignas(kCacheLine) float sums[2][kMatrixRows][kPanel];
      with_constant<2>(num, [&](auto count) {
        multiply_matrices<count>(sums[0][0], blocks, block_rows, product.inputs, panel, fetch);
      });
      for (int64_t own = 0; own < num; ++own)
        for (int64_t row = 0; row < block_rows; ++row)
          put_panel(product, output, begins[own] + row, sums[own][row], index * kPanel);
    }
  }
}
#endif

// Shares its panels among the threads of the region that calls it.
template <typename T>
void multiply(const Product& product, void* output, const void* input, int64_t num_rows) {
  if (num_rows == 0) return;
  T* to = static_cast<T*>(output);
  const T* from = static_cast<const T*>(input);
#if BLOCKDRAFT_GROUPS
  if (product.group_bits != 0) return multiply_groups(product, to, from, num_rows);
#endif
#if BLOCKDRAFT_HAS_NUMBERS
  if (product.scales != nullptr) return multiply_int8(product, to, from, num_rows);
#endif
#if BLOCKDRAFT_HAS_MATRICES
  if constexpr (std::is_same_v<T, BFloat16>)
    if (has_matrices()) return multiply_in_matrices(product, to, from, num_rows);
#endif
  const auto value = [](Lanes sum, int64_t, int64_t) { return sum; };
#if BLOCKDRAFT_SPLITS_PAIRS
  if constexpr (std::is_same_v<T, BFloat16>)
    if (splits_pairs()) return multiply_split(product, to, from, value, num_rows);
#endif
  const Operand<T, decltype(value)> rows{from, value};
  if constexpr (kReadsNarrow && std::is_same_v<T, float>)
    if (product.is_narrow) return multiply_held<Narrow>(product, to, rows, num_rows);
  // Without an instruction for pairs nothing reads panels of them in bfloat16.
  if constexpr (kStep<T> == kInputs<T, float> || !BLOCKDRAFT_SPLITS_PAIRS)
    multiply_held<T>(product, to, rows, num_rows);
}

}  // namespace blockdraft
