// A Hydra head: guesses of the token behind the newest one. `models/hydra_head.py` says what it
// computes, on rows in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "largest.h"
#include "products.h"
#include "rows.h"

namespace blockdraft {

struct HydraHead {
  Product join, gate_up, down, score;
  const float* feature_norms;  // [num_features, size]
  const float* embedding_norm;
  const float* norm;
  const float* last_norm;
  const void* embedding;  // [num_tokens, size], of all tokens
  int64_t embedding_is_bfloat16;
  int64_t num_features;
  int64_t num_tokens;
  const int64_t* token_ids;  // [score.outputs], rising, that are guessed
  const int64_t* places;     // [num_tokens], of each among them or -1
  double covered;  // of the target's choices, the share of what is guessed
  float eps;
};

constexpr int64_t kMostGuesses = 64;

// What a head says of the token behind a text.
class Guess {
 public:
  // From the features of the last token but one, and the last token. temperature: that logits are
  // divided by. num_top: of the most probable tokens, to be named.
  Guess(const HydraHead& head, const float* features, int64_t token, double temperature,
        int64_t num_top, int64_t num_threads)
      : head_(head), num_top_(std::min({num_top, head.score.outputs, kMostGuesses})) {
    float* logits = run(features, token, num_threads);
    const float factor = static_cast<float>(1.0 / temperature);
    for (int64_t i = 0; i < head.score.outputs; ++i) logits[i] *= factor;
    float values[kMostGuesses], total = 0.0f;
    largest_of_row(logits, head.score.outputs, num_top_, values, top_, &total);
    logits_ = logits;
    largest_ = static_cast<double>(values[0]);
    total_ = static_cast<double>(total);
  }

  // False where features are no numbers, and nothing can be said.
  bool is_known() const { return std::isfinite(largest_) && std::isfinite(total_); }

  int64_t num_top() const { return num_top_; }
  int64_t top(int64_t rank) const { return head_.token_ids[top_[rank]]; }

  // 0 of tokens that are not guessed.
  double probability(int64_t token) const {
    const int64_t place = token < head_.num_tokens ? head_.places[token] : -1;
    if (place < 0) return 0.0;
    return head_.covered * std::exp(static_cast<double>(logits_[place]) - largest_) / total_;
  }

 private:
  // Widens the embedding of a token, and norms it.
  void embed(float* to, int64_t token) const {
    const int64_t size = head_.down.outputs, first = token * size;
    if (head_.embedding_is_bfloat16 != 0)
      widen_row(to, static_cast<const BFloat16*>(head_.embedding) + first, size);
    else
      widen_row(to, static_cast<const float*>(head_.embedding) + first, size);
    norm_row(to, to, head_.embedding_norm, size, head_.eps, false);
  }

  // The logits, valid until the thread guesses again.
  float* run(const float* features, int64_t token, int64_t num_threads) {
    const int64_t size = head_.down.outputs, inner = head_.down.inputs;
    const int64_t num_scores = head_.score.outputs;
    static thread_local std::vector<float> room;
    const size_t num_values =
        static_cast<size_t>(head_.join.inputs + 3 * size + 3 * inner + num_scores);
    if (room.size() < num_values) room.resize(num_values);
    float *inputs = room.data(), *x = inputs + head_.join.inputs, *normed = x + size;
    float *read = normed + size, *gates = read + size, *gated = gates + 2 * inner;
    float* logits = gated + inner;
    for (int64_t i = 0; i < head_.num_features; ++i)
      norm_row(inputs + i * size, features + i * size, head_.feature_norms + i * size, size,
               head_.eps, false);
    embed(inputs + head_.num_features * size, token);
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    {
      multiply<float>(head_.join, x, inputs, 1);
      norm<float>(normed, nullptr, x, nullptr, head_.norm, 1, size, head_.eps, false);
      multiply<float>(head_.gate_up, gates, normed, 1);
      gate<float>(gated, gates, 1, inner);
      multiply<float>(head_.down, normed, gated, 1);
      norm<float>(read, x, normed, x, head_.last_norm, 1, size, head_.eps, false);
      multiply<float>(head_.score, logits, read, 1);
    }
    return logits;
  }

  const HydraHead& head_;
  int64_t num_top_;
  int64_t top_[kMostGuesses] = {};
  const float* logits_ = nullptr;
  double largest_ = 0.0, total_ = 1.0;
};

}  // namespace blockdraft
