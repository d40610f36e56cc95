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
  Product join, again, gate_up, down, score;  // `again` without outputs: only the next token is guessed
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
constexpr int64_t kMostGuessed = 8;  // texts, or paths behind one

// How guesses are made. temperature: that logits are divided by. num_top: of the most probable tokens,
// to be named.
struct Guessing {
  double temperature;
  int64_t num_top;
  int64_t num_threads;
};

// What a head says of the token behind a text, or behind each of some paths that go on from it.
//
// What it read of one token is read again with the next one. Only the last two guesses of a thread
// are valid.
class Guess {
 public:
  // From the features of the last token but one, and the last token.
  Guess(const HydraHead& head, const Guessing& how, const float* features, int64_t token)
      : head_(&head), how_(how), num_(1), depth_(0) {
    const int64_t size = head.down.outputs;
    float* inputs = lay_out(head.join.inputs);
    for (int64_t i = 0; i < head.num_features; ++i)
      norm_row(inputs + i * size, features + i * size, head.feature_norms + i * size, size,
               head.eps, false);
    embed(inputs + head.num_features * size, token);
    run(head.join, inputs);
  }

  // Behind the next tokens of [num] paths, each of which goes on from a row of `before`.
  Guess(const Guess& before, const int64_t* rows, const int64_t* tokens, int64_t num)
      : head_(before.head_), how_(before.how_), num_(num), depth_(before.depth_ + 1) {
    const int64_t size = head_->down.outputs;
    float* inputs = lay_out(head_->again.inputs);
    for (int64_t row = 0; row < num; ++row) {
      const float* read = before.read_ + rows[row] * size;
      std::copy(read, read + size, inputs + 2 * row * size);
      embed(inputs + (2 * row + 1) * size, tokens[row]);
    }
    run(head_->again, inputs);
  }

  // False where features are no numbers, and nothing can be said.
  bool is_known(int64_t row) const {
    return std::isfinite(largest_[row]) && std::isfinite(totals_[row]);
  }

  int64_t num_top() const { return std::min({how_.num_top, head_->score.outputs, kMostGuesses}); }
  int64_t top(int64_t row, int64_t rank) const { return head_->token_ids[top_[row][rank]]; }

  // 0 of tokens that are not guessed.
  double probability(int64_t row, int64_t token) const {
    const int64_t place = token < head_->num_tokens ? head_->places[token] : -1;
    if (place < 0) return 0.0;
    const float logit = logits_[row * head_->score.outputs + place];
    return head_->covered * std::exp(static_cast<double>(logit) - largest_[row]) / totals_[row];
  }

 private:
  // Room for the values of all rows; returns that of the inputs.
  float* lay_out(int64_t num_inputs) {
    const int64_t size = head_->down.outputs, inner = head_->down.inputs;
    static thread_local std::vector<float> rooms[2];
    std::vector<float>& room = rooms[depth_ % 2];
    const size_t num_values = static_cast<size_t>(
        num_ * (num_inputs + 3 * size + 3 * inner + head_->score.outputs));
    if (room.size() < num_values) room.resize(num_values);
    x_ = room.data() + num_ * num_inputs;
    normed_ = x_ + num_ * size;
    read_ = normed_ + num_ * size;
    gates_ = read_ + num_ * size;
    gated_ = gates_ + 2 * num_ * inner;
    logits_ = gated_ + num_ * inner;
    return room.data();
  }

  // Widens the embedding of a token, and norms it.
  void embed(float* to, int64_t token) const {
    const int64_t size = head_->down.outputs, first = token * size;
    if (head_->embedding_is_bfloat16 != 0)
      widen_row(to, static_cast<const BFloat16*>(head_->embedding) + first, size);
    else
      widen_row(to, static_cast<const float*>(head_->embedding) + first, size);
    norm_row(to, to, head_->embedding_norm, size, head_->eps, false);
  }

  void run(const Product& first, const float* inputs) {
    const int64_t size = head_->down.outputs, inner = head_->down.inputs;
#pragma omp parallel num_threads(how_.num_threads)
    {
      multiply<float>(first, x_, inputs, num_);
      norm<float>(normed_, nullptr, x_, nullptr, head_->norm, num_, size, head_->eps, false);
      multiply<float>(head_->gate_up, gates_, normed_, num_);
      gate<float>(gated_, gates_, num_, inner);
      multiply<float>(head_->down, normed_, gated_, num_);
      norm<float>(read_, x_, normed_, x_, head_->last_norm, num_, size, head_->eps, false);
      multiply<float>(head_->score, logits_, read_, num_);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < num_; ++row) weigh(row);
    }
  }

  void weigh(int64_t row) {
    const int64_t num_scores = head_->score.outputs;
    float *logits = logits_ + row * num_scores, values[kMostGuesses], total = 0.0f;
    const float factor = static_cast<float>(1.0 / how_.temperature);
    for (int64_t i = 0; i < num_scores; ++i) logits[i] *= factor;
    largest_of_row(logits, num_scores, num_top(), values, top_[row], &total);
    largest_[row] = static_cast<double>(values[0]);
    totals_[row] = static_cast<double>(total);
  }

  const HydraHead* head_;
  Guessing how_;
  int64_t num_, depth_;
  float *x_ = nullptr, *normed_ = nullptr, *read_ = nullptr, *gates_ = nullptr, *gated_ = nullptr;
  float* logits_ = nullptr;
  int64_t top_[kMostGuessed][kMostGuesses] = {};
  double largest_[kMostGuessed] = {}, totals_[kMostGuessed] = {};
};

}  // namespace blockdraft
