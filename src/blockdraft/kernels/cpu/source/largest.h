// The largest scores of a row, and the sum that makes them probabilities; or the first of the largest.

#pragma once

#include "lanes.h"

namespace blockdraft {

constexpr int64_t kScorePiece = 4 * kLanes;

// What is no number counts as minus infinity.
inline Lanes numbers_only(Lanes x) { return select(x == x, x, all(-INFINITY)); }

template <typename T>
Lanes load_scores(const T* from, int64_t num) {
  if (num >= kLanes) return numbers_only(load(from));
  float some[kLanes];
  store(some, numbers_only(load_some(from, num)));
  for (int64_t i = num; i < kLanes; ++i) some[i] = -INFINITY;
  return load(some);
}

// Some scores, at most kScorePiece, as `piece`. Returns the largest by lanes.
template <typename T>
Lanes load_piece(float* piece, const T* from, int64_t num) {
  Lanes most = all(-INFINITY);
  for (int64_t i = 0; i < num; i += kLanes) {
    const Lanes x = load_scores(from + i, num - i);
    store(piece + i, x);
    most = largest(most, x);
  }
  return most;
}

// The `num_kept` largest of `num` scores, the largest first and the first of equal ones, their places,
// and the sum of exp(score - largest) of all.
template <typename T>
void largest_of_row(const T* row, int64_t num, int64_t num_kept, float* values, int64_t* places,
                    float* total) {
  int64_t num_found = 0;
  float piece[kScorePiece];
  for (int64_t first = 0; first < num; first += kScorePiece) {
    const int64_t size = num - first < kScorePiece ? num - first : kScorePiece;
    const Lanes most = load_piece(piece, row + first, size);
    if (num_found == num_kept && !(largest(most) > values[num_kept - 1])) continue;
    for (int64_t i = 0; i < size; ++i) {
      if (num_found == num_kept && !(piece[i] > values[num_kept - 1])) continue;
      int64_t at = num_found < num_kept ? num_found++ : num_kept - 1;
      for (; at > 0 && values[at - 1] < piece[i]; --at) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
      }
      values[at] = piece[i];
      places[at] = first + i;
    }
  }
  const Lanes base = all(values[0] == -INFINITY ? 0.0f : values[0]);
  Lanes sums{};
  for (int64_t i = 0; i < num; i += kLanes)
    sums = sums + exponential(load_scores(row + i, num - i) - base);
  *total = sum(sums);
}

// The place of the largest score, the first of equal ones; -1 if one is no number, or all are minus
// infinity.
template <typename T>
int64_t first_largest(const T* row, int64_t num) {
  const auto from = [&](int64_t i) {
    if (i + kLanes <= num) return load(row + i);
    float some[kLanes];
    store(some, load_some(row + i, num - i));
    for (int64_t j = num - i; j < kLanes; ++j) some[j] = -INFINITY;
    return load(some);
  };
  Lanes most = all(-INFINITY), num_strange{};
  for (int64_t i = 0; i < num; i += kLanes) {
    const Lanes x = from(i);
    most = largest(x, most);
    num_strange = num_strange + select(x == x, all(0.0f), all(1.0f));
  }
  const float best = largest(most);
  if (sum(num_strange) > 0.0f || best == -INFINITY) return -1;
  for (int64_t first = 0; first < num; first += kScorePiece) {
    const int64_t end = first + kScorePiece < num ? first + kScorePiece : num;
    Lanes own = all(-INFINITY);
    for (int64_t i = first; i < end; i += kLanes) own = largest(from(i), own);
    if (largest(own) < best) continue;
    float piece[kScorePiece];
    for (int64_t i = first; i < end; i += kLanes) store(piece + (i - first), from(i));
    for (int64_t i = first; i < end; ++i)
      if (piece[i - first] == best) return i;
  }
  return -1;
}

}  // namespace blockdraft
