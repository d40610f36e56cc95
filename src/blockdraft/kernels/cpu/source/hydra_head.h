// A Hydra head: guesses of the token behind the newest one. `models/hydra_head.py` says what it
// computes, on rows in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "largest.h"
#include "products.h"
#include "rows.h"
#include "worker.h"

namespace blockdraft {

struct HydraHead {
  Product join, gate_up, down, score;
  const float* feature_norms;  // [num_features, size]
  const float* embedding_norm;
  const float* norm;
  const float* last_norm;
  const void* embedding;  // [num_tokens, size], of all tokens
  int64_t embedding_is_bfloat16;
  const int64_t* read_places;  // [num_features], of layers among the features of a token
  int64_t num_features;
  int64_t num_tokens;
  const int64_t* token_ids;  // [score.outputs], rising, that are guessed
  const int64_t* places;     // [num_tokens], of each among them or -1
  double covered;  // of the target's choices, the share of what is guessed
  float eps;
};

// Outputs of layers of the target behind one token, one after another.
struct Features {
  const void* values;  // null where nothing is known
  int64_t is_bfloat16;
};

constexpr int64_t kMostGuesses = 64;

// What a head makes of one token and the features before it.
class Reading {
 public:
  // Takes what is read; nothing of it need stay afterwards.
  void take(const HydraHead& head, const Features& features, int64_t token) {
    const int64_t size = head.down.outputs, inner = head.down.inputs;
    const size_t num_values = static_cast<size_t>(head.join.inputs + 3 * size + 3 * inner +
                                                  head.score.outputs);
    if (room_.size() < num_values) room_.resize(num_values);
    for (int64_t i = 0; i < head.num_features; ++i)
      take_row(head, i, features.values, features.is_bfloat16, head.read_places[i],
               head.feature_norms + i * size);
    take_row(head, head.num_features, head.embedding, head.embedding_is_bfloat16, token,
             head.embedding_norm);
  }

  // Of the token behind: [score.outputs], valid until the next token is taken.
  float* logits(const HydraHead& head, int64_t num_threads) {
    const int64_t size = head.down.outputs, inner = head.down.inputs;
    float *inputs = room_.data(), *x = inputs + head.join.inputs, *normed = x + size;
    float *read = normed + size, *gates = read + size, *gated = gates + 2 * inner;
    float* logits = gated + inner;
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    {
      multiply<float>(head.join, x, inputs, 1);
      norm<float>(normed, nullptr, x, nullptr, head.norm, 1, size, head.eps, false);
      multiply<float>(head.gate_up, gates, normed, 1);
      gate<float>(gated, gates, 1, inner);
      multiply<float>(head.down, normed, gated, 1);
      norm<float>(read, x, normed, x, head.last_norm, 1, size, head.eps, false);
      multiply<float>(head.score, logits, read, 1);
    }
    return logits;
  }

 private:
  // Widens a row of some, norms it, and puts it down as the i-th of the inputs.
  void take_row(const HydraHead& head, int64_t i, const void* rows, int64_t is_bfloat16,
                int64_t row, const float* norm) {
    const int64_t size = head.down.outputs;
    float* to = room_.data() + i * size;
    if (is_bfloat16 != 0)
      widen_row(to, static_cast<const BFloat16*>(rows) + row * size, size);
    else
      widen_row(to, static_cast<const float*>(rows) + row * size, size);
    norm_row(to, to, norm, size, head.eps, false);
  }

  std::vector<float> room_;
};

// What a head says of the token behind a text.
class Guess {
 public:
  // logits: of a reading, which this changes. temperature: that they are divided by. num_top: of
  // the most probable tokens, to be named.
  Guess(const HydraHead& head, float* logits, double temperature, int64_t num_top)
      : head_(head),
        logits_(logits),
        num_top_(std::min({num_top, head.score.outputs, kMostGuesses})) {
    const float factor = static_cast<float>(1.0 / temperature);
    for (int64_t i = 0; i < head.score.outputs; ++i) logits[i] *= factor;
    float values[kMostGuesses], total = 0.0f;
    largest_of_row(logits, head.score.outputs, num_top_, values, top_, &total);
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
  const HydraHead& head_;
  const float* logits_;
  int64_t num_top_;
  int64_t top_[kMostGuesses] = {};
  double largest_ = 0.0, total_ = 1.0;
};

// A reading that the worker makes, while others decide what to do next.
class ReadingAhead {
 public:
  // Of a text with so many tokens, the last one of them given. The head must stay.
  void begin(const HydraHead& head, const Features& features, int64_t token, int64_t num_tokens) {
    task_.finish();
    reading_.take(head, features, token);
    head_ = &head;
    num_tokens_ = num_tokens;
    task_.begin();
  }

  // As of a reading, once; null where the worker has made none of so many tokens.
  float* logits(int64_t num_tokens) {
    const bool is_done = task_.finish();
    return is_done && num_tokens == num_tokens_ ? logits_ : nullptr;
  }

 private:
  void run() noexcept { logits_ = reading_.logits(*head_, 1); }

  Reading reading_;
  const HydraHead* head_ = nullptr;
  int64_t num_tokens_ = 0;
  float* logits_ = nullptr;
  // The last one: it ends before what it works with.
  Task task_{[](void* self) { static_cast<ReadingAhead*>(self)->run(); }, this};
};

}  // namespace blockdraft
