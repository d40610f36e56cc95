// Products of a few queries with a tile of 64 keys and values.
//
// Each query's sums take the same steps in the same order, however many queries share a call.

#pragma once

#include "matrices.h"

namespace blockdraft {

constexpr int64_t kTile = 64;
constexpr int kTileLanes = kTile / kLanes;

struct Range {
  int64_t first;
  int64_t end;
};

// Groups of lanes of which N queries keep sums together: as many as the registers hold.
template <int N>
constexpr int kSumLanes = !BLOCKDRAFT_TWO_REGISTERS || N == 1 ? 4 : N <= 3 ? 2 : 1;

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

inline __m256 load_eight(const float* from) { return _mm256_loadu_ps(from); }

inline __m256 load_eight(const BFloat16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
}

// columns[word][key] of those keys of a tile that somebody sees; zeros for the others, which may lie
// outside of the buffer.
template <typename T>
void transpose_keys(float* columns, const T* keys, Range seen, int64_t head_dim) {
  for (int64_t first = 0; first < kTile; first += 8) {
    const bool are_all_seen = seen.first <= first && first + 8 <= seen.end;
    for (int64_t word = 0; word < head_dim; word += 8) {
      const T* from = keys + first * head_dim + word;
      __m256 square[8];
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i) {
        const bool is_seen = are_all_seen || (first + i >= seen.first && first + i < seen.end);
        square[i] = is_seen ? load_eight(from + i * head_dim) : _mm256_setzero_ps();
      }
      transpose_8(square);
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i)
        _mm256_storeu_ps(columns + (word + i) * kTile + first, square[i]);
    }
  }
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
#endif

// Whether queries in bfloat16 meet keys and values in matrix registers, however many there are: their sums round
// otherwise than those of lanes.
inline bool attends_in_matrices(int64_t head_dim) {
#if BLOCKDRAFT_HAS_MATRICES
  return head_dim % kMatrixInputs == 0 && has_matrices();
#else
  (void)head_dim;
  return false;
#endif
}

#if BLOCKDRAFT_HAS_MATRICES
// scores[n][key] of the queries that the registers are set for, in words, with all keys of a tile.
inline void multiply_keys_in_matrices(float* scores, const float* queries, const float* columns,
                                      int64_t num_words) {
  constexpr int64_t kWords = kMatrixInputs / 2, kStride = kTile * static_cast<int64_t>(sizeof(float));
  static_assert(kTileLanes == 4, "a register for the sums of each group of keys");
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t word = 0; word < num_words; word += kWords) {
    const float* keys = columns + word * kTile;
    _tile_loadd(6, queries + word, num_words * static_cast<int64_t>(sizeof(float)));
    _tile_loadd(7, keys, kStride);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, keys + kLanes, kStride);
    _tile_dpbf16ps(1, 6, 7);
    _tile_loadd(7, keys + 2 * kLanes, kStride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(7, keys + 3 * kLanes, kStride);
    _tile_dpbf16ps(3, 6, 7);
  }
  _tile_stored(0, scores, kStride);
  _tile_stored(1, scores + kLanes, kStride);
  _tile_stored(2, scores + 2 * kLanes, kStride);
  _tile_stored(3, scores + 3 * kLanes, kStride);
  settle_memory();
}

// pairs[key / 2][dim]: in each word the values of two keys, of those of a tile that are seen; zeros
// for the others, which may be no numbers.
inline void pair_values(float* pairs, const BFloat16* values, Range seen, int64_t head_dim) {
  const auto load_seen = [&](int64_t key, int64_t d) {
    Halves own{};
    if (seen.first <= key && key < seen.end)
      std::memcpy(&own, values + key * head_dim + d, sizeof own);
    return widened(own);
  };
  for (int64_t key = 0; key < kTile; key += 2, pairs += head_dim)
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(pairs + d, (Lanes)(load_seen(key, d) | load_seen(key + 1, d) << 16));
}

// Whether a value of these keys is infinite or no number.
inline bool hold_no_number(const BFloat16* values, Range keys, int64_t head_dim) {
  constexpr uint16_t kExponent = 0x7f80;
  uint16_t found = 0;
  for (int64_t i = keys.first * head_dim; i < keys.end * head_dim; ++i)
    found |= (values[i].bits & kExponent) == kExponent;
  return found != 0;
}

// Weights of queries as sums of two bfloat16 values, of which one alone would have half of their bits.
template <int kNum>
struct SplitWeights {
  alignas(kCacheLine) BFloat16 high[kNum * kTile];
  alignas(kCacheLine) BFloat16 low[kNum * kTile];

  // Of a query with all keys of a tile.
  void put(int64_t index, const float* weights) {
    const auto round = [](BFloat16* to, Lanes x) {
      const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
      std::memcpy(to, &halves, sizeof halves);
      return (Lanes)(widened((Halves)halves) << 16);
    };
    for (int64_t key = 0; key < kTile; key += kLanes) {
      const int64_t at = index * kTile + key;
      const Lanes own = load(weights + key);
      round(low + at, own - round(high + at, own));
    }
  }
};

// Adds the weighted values of all keys of a tile to sums[n] of the queries that the registers are set
// for.
inline void add_values_in_matrices(float* sums, const BFloat16* high, const BFloat16* low,
                                   const float* pairs, int64_t head_dim) {
  constexpr int64_t kStride = kTile * static_cast<int64_t>(sizeof(BFloat16));
  static_assert(kTile == 2 * kMatrixInputs, "two registers for the weights of a tile");
  const int64_t stride = head_dim * static_cast<int64_t>(sizeof(float));
  const float* last_pairs = pairs + kMatrixInputs / 2 * head_dim;
  settle_memory();
  _tile_loadd(3, high, kStride);
  _tile_loadd(4, low, kStride);
  _tile_loadd(5, high + kMatrixInputs, kStride);
  _tile_loadd(6, low + kMatrixInputs, kStride);
  for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
    _tile_loadd(0, sums + d, stride);
    _tile_loadd(1, sums + d + kLanes, stride);
    _tile_loadd(7, pairs + d, stride);
    _tile_dpbf16ps(0, 3, 7);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(7, pairs + d + kLanes, stride);
    _tile_dpbf16ps(1, 3, 7);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(7, last_pairs + d, stride);
    _tile_dpbf16ps(0, 5, 7);
    _tile_dpbf16ps(0, 6, 7);
    _tile_loadd(7, last_pairs + d + kLanes, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_stored(0, sums + d, stride);
    _tile_stored(1, sums + d + kLanes, stride);
  }
  settle_memory();
}
#endif

// Whether keys of T, which lie in pairs, are taken apart and meet queries in float32.
template <typename T>
bool splits_keys(int64_t head_dim) {
  return kStep<T> == 2 && splits_pairs() && !attends_in_matrices(head_dim);
}

// scores[n][key] of N queries in words of Q with all keys of a tile, in words of K; `C` groups of
// lanes at a time.
template <typename K, typename Q, int N, int C>
void multiply_keys(float* scores, const float* queries, const float* columns, int64_t num_words) {
  constexpr int kParts = kStep<K> / kStep<Q>;
  Lanes sums[N][C] = {};
  const auto add_part = [&](int64_t word, auto part) {
    Lanes keys[C];
#pragma GCC unroll 8  // the sums stay in registers
    for (int i = 0; i < C; ++i) {
      const float* from = columns + word * kTile + i * kLanes;
#if BLOCKDRAFT_SPLITS_PAIRS
      if constexpr (kParts == 2)
        keys[i] = load_of_pairs<part>(from);
      else
#endif
        keys[i] = load(from);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Lanes query = spread(queries + (n * num_words + word) * kParts + part);
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) sums[n][i] = add_step<Q>(query, keys[i], sums[n][i]);
    }
  };
  for (int64_t word = 0; word < num_words; ++word) {
    add_part(word, std::integral_constant<int, 0>{});
    if constexpr (kParts == 2) add_part(word, std::integral_constant<int, 1>{});
  }
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) store(scores + n * kTile + i * kLanes, sums[n][i]);
}

template <typename K, typename Q, int N>
void multiply_keys(float* scores, const float* queries, const float* columns, int64_t num_words) {
  constexpr int kAtOnce = kSumLanes<N>;
  for (int i = 0; i < kTileLanes; i += kAtOnce)
    multiply_keys<K, Q, N, kAtOnce>(scores + i * kLanes, queries, columns + i * kLanes, num_words);
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
      for (int c = 0; c < C; ++c) held[n][c] = add_step<float>(weight, value[c], held[n][c]);
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
  constexpr int kAtOnce = kSumLanes<N>;
  int64_t d = 0;
  for (; d + kAtOnce * kLanes <= head_dim; d += kAtOnce * kLanes)
    add_values<T, N, kAtOnce>(sums + d, weights, values + d, keys, head_dim);
  for (; d < head_dim; d += kLanes)
    add_values<T, N, 1>(sums + d, weights, values + d, keys, head_dim);
}

}  // namespace blockdraft
