// Scores of the tokens of a vocabulary, from which a drafter guesses and the target's token is chosen.

#include <algorithm>
#include <cmath>

#include "largest.h"
#include "philox.h"
#include "rows.h"

namespace blockdraft {
namespace {

constexpr int64_t kUndecided = -2;
// Where more than one token in this many can win, all noise is drawn instead, by others; `MAX_SHARE`
// of race.py.
constexpr int64_t kMostShare = 16;
// Values closer than this may come in another order where logarithms round otherwise.
constexpr double kTooClose = 1e-9;

// The tokens of a place whose noise exceeds `bound`, rising, with their noise.
struct LargeNoise {
  const int64_t* ids;
  const double* noise;
  int64_t num;
  double bound;
  double least;  // that any noise has
};

// The two largest values of different tokens.
struct Race {
  int64_t leader = kUndecided;
  double best = -INFINITY, second = -INFINITY;

  void enter(int64_t id, double value) {
    if (id == leader) return;  // it has entered
    if (value > best) {
      second = best;
      best = value;
      leader = id;
    } else {
      second = std::max(second, value);
    }
  }

  int64_t winner() const { return best - second > kTooClose ? leader : kUndecided; }
};

// Calls for each score that is no less, in order, with its place, while that returns true.
template <typename T, typename Take>
void each_from(const T* scores, int64_t num, float least, const Take& take) {
  for (int64_t first = 0; first < num; first += kScorePiece) {
    const int64_t size = std::min(kScorePiece, num - first);
    float piece[kScorePiece];
    if (largest(load_piece(piece, scores + first, size)) < least) continue;
    for (int64_t i = 0; i < size; ++i)
      if (piece[i] >= least && !take(first + i, piece[i])) return;
  }
}

// See blockdraft_sampled.
template <typename T>
int64_t sampled(const T* scores, int64_t num, double temperature, const Stream& stream,
                const LargeNoise& large) {
  const int64_t highest = first_largest(scores, num);
  if (highest < 0) return highest;
  const double top = static_cast<double>(value_of(scores[highest]));
  if (std::isinf(top)) return highest;  // it outweighs all noise
  const auto tempered = [&](float score) {
    return (static_cast<double>(score) - top) / temperature;
  };
  Race race;
  for (int64_t i = 0; i < large.num; ++i)
    race.enter(large.ids[i], tempered(value_of(scores[large.ids[i]])) + large.noise[i]);
  // No noise of another token exceeds the bound.
  const double distance = std::max(race.best, large.least) - large.bound - kTooClose;
  const double exact = top + distance * temperature - 1e-15 * std::abs(top);
  const float least = std::nextafterf(static_cast<float>(exact), -INFINITY);
  int64_t num_near = 0;
  each_from(scores, num, least, [&](int64_t id, float score) {
    if (++num_near * kMostShare > num) return false;
    uint64_t words[1][kWords];
    const int64_t block = id / kWords;
    draw<1>(words, stream, &block);
    race.enter(id, tempered(score) + gumbel_noise(words[0][id % kWords]));
    return true;
  });
  return num_near * kMostShare > num ? kUndecided : race.winner();
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// The place of the largest score [num] over the temperature plus noise of the stream: -1 if a score is
// no number, or all are minus infinity; -2 where it is not certain, or too many could have won.
int64_t blockdraft_sampled(int is_bfloat16, const void* scores, int64_t num, double temperature,
                           const void* stream, const int64_t* large_ids, const double* large_noise,
                           int64_t num_large, double bound, double least_noise) {
  using namespace blockdraft;
  const Stream& own = *static_cast<const Stream*>(stream);
  const LargeNoise large{large_ids, large_noise, num_large, bound, least_noise};
  if (is_bfloat16)
    return sampled(static_cast<const BFloat16*>(scores), num, temperature, own, large);
  return sampled(static_cast<const float*>(scores), num, temperature, own, large);
}

// Of scores [num_rows, num]: values and places [num_rows, num_kept], totals [num_rows].
void blockdraft_largest(int is_bfloat16, float* values, int64_t* places, float* totals,
                        const void* scores, int64_t num_rows, int64_t num, int64_t num_kept) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      blockdraft::largest_of_row(static_cast<const T*>(scores) + row * num, num, num_kept,
                                 values + row * num_kept, places + row * num_kept, totals + row);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// places: [num_rows], of the first largest of scores [num_rows, num].
void blockdraft_first_largest(int is_bfloat16, int64_t* places, const void* scores,
                              int64_t num_rows, int64_t num) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      places[row] = blockdraft::first_largest(static_cast<const T*>(scores) + row * num, num);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// The same numbers, [num] each.
void blockdraft_widen(float* to, const void* from, int64_t num) {
  blockdraft::widen_row(to, static_cast<const blockdraft::BFloat16*>(from), num);
}

}  // extern "C"
