// Products of a few queries with a tile of 64 keys and values.
//
// Each query's sums take the same steps in the same order, however many queries share a call.

#pragma once

#include "lanes.h"

namespace blockdraft {

constexpr int64_t kTile = 64;
constexpr int kTileLanes = kTile / kLanes;

struct Range {
  int64_t first;
  int64_t end;
};

#if BLOCKDRAFT_TWO_REGISTERS
inline void transpose_8(__m256 rows[8]) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 8
    for (int j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
    }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// Square by square of eight.
inline void transpose(Lanes rows[kLanes]) {
  float values[2][2][8][8];
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      __m256 square[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k)
        square[k] = (__m256)(j == 0 ? rows[8 * i + k].low : rows[8 * i + k].high);
      transpose_8(square);
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) _mm256_storeu_ps(values[j][i][k], square[k]);
    }
  for (int j = 0; j < 2; ++j)
    for (int k = 0; k < 8; ++k)
      rows[8 * j + k] = {(Lanes::Register)_mm256_loadu_ps(values[j][0][k]),
                         (Lanes::Register)_mm256_loadu_ps(values[j][1][k])};
}
#else
#if defined(__clang__) || __GNUC__ >= 12
#define BLOCKDRAFT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define BLOCKDRAFT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

inline Lanes zip_low(Lanes a, Lanes b) {
  return BLOCKDRAFT_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

inline Lanes zip_high(Lanes a, Lanes b) {
  return BLOCKDRAFT_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Each round moves the highest bit of the row into the lane and the highest of the lane into the
// row; after four, rows are columns.
inline void transpose(Lanes rows[kLanes]) {
  for (int round = 0; round < 4; ++round) {
    Lanes zipped[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      zipped[2 * i] = zip_low(rows[i], rows[i + kLanes / 2]);
      zipped[2 * i + 1] = zip_high(rows[i], rows[i + kLanes / 2]);
    }
    for (int i = 0; i < kLanes; ++i) rows[i] = zipped[i];
  }
}
#endif

// columns[word][key] of those keys of a tile that somebody sees; zeros for the others, which may lie
// outside of the buffer.
template <typename T>
void transpose_keys(float* columns, const T* keys, Range seen, int64_t head_dim) {
  const int64_t num_words = head_dim / kStep<T>;
  for (int64_t first = 0; first < kTile; first += kLanes) {
    const bool are_all_seen = seen.first <= first && first + kLanes <= seen.end;
    for (int64_t word = 0; word < num_words; word += kLanes) {
      const int64_t num = num_words - word < kLanes ? num_words - word : kLanes;
      const T* from = keys + first * head_dim + word * kStep<T>;
      Lanes square[kLanes];
      if (are_all_seen && num == kLanes) {  // nothing to ask in between, as nearly always
        for (int64_t i = 0; i < kLanes; ++i) square[i] = load_words(from + i * head_dim);
      } else {
        for (int64_t i = 0; i < kLanes; ++i) {
          const bool is_seen = first + i >= seen.first && first + i < seen.end;
          square[i] = is_seen ? load_words(from + i * head_dim, num) : Lanes{};
        }
      }
      transpose(square);
      for (int64_t i = 0; i < num; ++i) store(columns + (word + i) * kTile + first, square[i]);
    }
  }
}

// scores[n][key] of N queries, in words, with all keys of a tile.
template <typename T, int N>
void multiply_keys(float* scores, const float* queries, const float* columns, int64_t num_words) {
  Lanes sums[N][kTileLanes] = {};
  for (int64_t word = 0; word < num_words; ++word) {
    Lanes keys[kTileLanes];
#pragma GCC unroll 8  // the sums stay in registers
    for (int i = 0; i < kTileLanes; ++i) keys[i] = load(columns + word * kTile + i * kLanes);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Lanes query = spread(queries + n * num_words + word);
#pragma GCC unroll 8
      for (int i = 0; i < kTileLanes; ++i)
        sums[n][i] = multiply_step<T>(query, keys[i], sums[n][i]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int i = 0; i < kTileLanes; ++i) store(scores + n * kTile + i * kLanes, sums[n][i]);
}

// Adds the weighted values of some keys, one key after another, to sums[n] of N queries; `C` groups
// of lanes at a time.
template <typename T, int N, int C>
void add_values(float* sums, const float* weights, const T* values, Range keys, int64_t head_dim) {
  Lanes held[N][C];
#pragma GCC unroll 8  // they stay in registers
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) held[n][c] = load(sums + n * head_dim + c * kLanes);
  for (int64_t key = keys.first; key < keys.end; ++key) {
    Lanes value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) value[c] = load(values + key * head_dim + c * kLanes);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Lanes weight = spread(weights + n * kTile + key);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) held[n][c] = multiply_add(weight, value[c], held[n][c]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + n * head_dim + c * kLanes, held[n][c]);
}

template <typename T, int N>
void add_values(float* sums, const float* weights, const T* values, Range keys, int64_t head_dim) {
  if (keys.first >= keys.end) return;
  int64_t d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes)
    add_values<T, N, 4>(sums + d, weights, values + d, keys, head_dim);
  for (; d < head_dim; d += kLanes)
    add_values<T, N, 1>(sums + d, weights, values + d, keys, head_dim);
}

}  // namespace blockdraft
