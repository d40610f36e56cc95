// A Hydra head: guesses of the tokens behind a text. `models/draft/hydra_head.py` says what it computes, on
// rows in float32.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "largest.h"
#include "products.h"
#include "rows.h"

namespace blockdraft {

struct HydraHead {
  Product join, join_on, heads, out, gate_up, down, score;
  const float* feature_norms;  // [num_features, size]
  const float* embedding_norm;
  const float* state_norm;
  const float* next_norm;  // of the embedding that is joined to a state
  const float* attention_norm;
  const float* norm;
  const float* last_norm;
  const float* frequencies;  // [head_dim / 2], of rotations
  int64_t num_heads;
  int64_t num_keys;  // heads of keys, and of values
  int64_t head_dim;
  int64_t window;      // places that are looked back at
  const void* embedding;  // [num_tokens, size], of all tokens
  int64_t embedding_is_bfloat16;
  const int64_t* read_places;  // [num_features], of layers among the features of a token
  int64_t num_features;
  int64_t num_values;  // features of a token, of all layers
  int64_t num_tokens;
  const int64_t* token_ids;  // [score.outputs], rising, that are guessed
  const int64_t* places;     // [num_tokens], of each among them or -1
  double covered;  // of the target's choices, the share of what is guessed
  float eps;

  int64_t size() const { return down.outputs; }
  int64_t num_all_heads() const { return num_heads + 2 * num_keys; }
};

// Outputs of layers of the target behind tokens, of each token one layer after another.
struct Features {
  const void* values;  // null where nothing is known
  int64_t is_bfloat16;
  int64_t num_rows;
};

constexpr int64_t kMostGuesses = 64;
constexpr int64_t kNoPlace = -1;

// Keys and values of the last places of a text. Keys lie dimension by dimension, so that a query
// meets those of sixteen places at once.
class Memory {
 public:
  // Slots of a memory, and what fills them up to whole lanes.
  static int64_t stride_of(const HydraHead& head) {
    return (head.window + kLanes - 1) / kLanes * kLanes;
  }

  void make_room(const HydraHead& head) {
    if (!places_.empty()) return;
    window_ = head.window;
    stride_ = stride_of(head);
    const int64_t num_values = head.num_keys * head.head_dim * stride_;
    keys_.resize(static_cast<size_t>(num_values));
    values_.resize(static_cast<size_t>(num_values));
    places_.assign(static_cast<size_t>(stride_), kNoPlace);
  }

  // Keys and values of a place, [num_keys, head_dim] each; nothing where one is no number.
  void put(const HydraHead& head, int64_t place, const float* keys, const float* values) {
    const int64_t num = head.num_keys * head.head_dim, slot = place % window_;
    const auto is_number = [](float x) { return std::isfinite(x); };
    if (!std::all_of(keys, keys + num, is_number) || !std::all_of(values, values + num, is_number))
      return;
    for (int64_t i = 0; i < num; ++i) keys_[static_cast<size_t>(i * stride_ + slot)] = keys[i];
    for (int64_t i = 0; i < num; i += head.head_dim)
      std::copy_n(values + i, head.head_dim, values_.data() + i * stride_ + slot * head.head_dim);
    places_[static_cast<size_t>(slot)] = place;
    num_used_ = std::max(num_used_, slot + 1);
  }

  int64_t num_used() const { return num_used_; }
  int64_t stride() const { return stride_; }
  // Of a head, [head_dim, stride].
  const float* keys(int64_t head, int64_t head_dim) const {
    return keys_.data() + head * head_dim * stride_;
  }
  // [stride, head_dim].
  const float* values(int64_t head, int64_t head_dim) const {
    return values_.data() + head * head_dim * stride_;
  }
  bool is_seen_from(int64_t place, int64_t slot) const {
    const int64_t own = places_[static_cast<size_t>(slot)];
    return own != kNoPlace && own > place - window_ && own <= place;
  }

 private:
  int64_t window_ = 0, stride_ = 0, num_used_ = 0;
  std::vector<float> keys_, values_;
  std::vector<int64_t> places_;  // of each slot
};

// A place that is read: its state, and its keys and values if they are in no memory.
struct Thought {
  const Memory* memory = nullptr;  // of its text
  int64_t place = 0;
  int64_t num_path = 0;  // places in no memory, from the text's end to this one
  std::vector<float> state;
  std::vector<float> keys, values;
  const Thought* before = nullptr;  // of the path; the text's end at its begin
};

// Rows of a head at work. Threads of a region call these together.
class HeadRows {
 public:
  // num_finished: of the rows, those that go on behind their keys and values. depth: of the longest
  // path behind a text.
  void make_room(const HydraHead& head, int64_t num_rows, int64_t num_inputs, int64_t num_finished,
                 int64_t depth) {
    const int64_t size = head.size(), inner = head.down.inputs;
    weights_stride_ = Memory::stride_of(head) + (depth + kLanes - 1) / kLanes * kLanes;
    fit(inputs, num_rows * num_inputs);
    fit(x, num_rows * size);
    fit(normed, num_rows * size);
    fit(heads, num_rows * head.num_all_heads() * head.head_dim);
    fit(attended, num_finished * head.num_heads * head.head_dim);
    fit(weights, num_finished * head.num_heads * weights_stride_);
    fit(gates, num_finished * 2 * inner);
    fit(gated, num_finished * inner);
    fit(logits, num_finished * head.score.outputs);
  }

  // Rows that are joined already in `x` -> their turned queries and keys, and values.
  void split_heads(const HydraHead& head, const std::vector<int64_t>& row_places) {
    const int64_t num_rows = static_cast<int64_t>(row_places.size()), dim = head.head_dim;
    norm<float>(normed.data(), nullptr, x.data(), nullptr, head.attention_norm, num_rows,
                head.size(), head.eps, false);
    multiply<float>(head.heads, heads.data(), normed.data(), num_rows);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_rows; ++row) {
      float cosine[kMostDim], sine[kMostDim];
      for (int64_t i = 0; i < dim / 2; ++i) {
        const float angle = static_cast<float>(row_places[static_cast<size_t>(row)]) *
                            head.frequencies[i];
        cosine[i] = cosine[i + dim / 2] = std::cos(angle);
        sine[i + dim / 2] = std::sin(angle);
        sine[i] = -sine[i + dim / 2];
      }
      float* own = row_heads(head, row);
      for (int64_t i = 0; i < head.num_heads + head.num_keys; ++i)
        rotate_head(own + i * dim, cosine, sine, dim / 2);
    }
  }

  float* row_heads(const HydraHead& head, int64_t row) {
    return heads.data() + row * head.num_all_heads() * head.head_dim;
  }
  const float* row_keys(const HydraHead& head, int64_t row) {
    return row_heads(head, row) + head.num_heads * head.head_dim;
  }
  const float* row_values(const HydraHead& head, int64_t row) {
    return row_keys(head, row) + head.num_keys * head.head_dim;
  }

  // Leaves nothing of the rows but these, rising, whose keys and values are read no more.
  void keep(const HydraHead& head, const std::vector<int64_t>& rows) {
    const int64_t size = head.size(), num_queries = head.num_heads * head.head_dim;
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t to = static_cast<int64_t>(i), from = rows[i];
      if (to == from) continue;
      std::copy_n(x.data() + from * size, size, x.data() + to * size);
      std::copy_n(row_heads(head, from), num_queries, row_heads(head, to));
    }
  }

  // What the first rows make of what they see, the memory and the thoughts before them: their states
  // in `x`, and `logits` [rows, score.outputs]. thoughts: one of each row.
  void finish(const HydraHead& head, const std::vector<Thought*>& thoughts) {
    const int64_t size = head.size(), inner = head.down.inputs;
    const int64_t num_rows = static_cast<int64_t>(thoughts.size());
    float* own = x.data();
#pragma omp for collapse(2) schedule(static)
    for (int64_t row = 0; row < num_rows; ++row)
      for (int64_t index = 0; index < head.num_heads; ++index)
        attend(head, *thoughts[static_cast<size_t>(row)], index,
               row_heads(head, row) + index * head.head_dim,
               weights.data() + (row * head.num_heads + index) * weights_stride_,
               attended.data() + (row * head.num_heads + index) * head.head_dim);
    multiply<float>(head.out, normed.data(), attended.data(), num_rows);
    norm<float>(normed.data(), own, normed.data(), own, head.norm, num_rows, size, head.eps, false);
    multiply<float>(head.gate_up, gates.data(), normed.data(), num_rows);
    gate<float>(gated.data(), gates.data(), num_rows, inner);
    multiply<float>(head.down, normed.data(), gated.data(), num_rows);
    norm<float>(normed.data(), own, normed.data(), own, head.last_norm, num_rows, size, head.eps,
                false);
    multiply<float>(head.score, logits.data(), normed.data(), num_rows);
  }

  // Widens a row of some, norms it, and puts it down.
  static void take_row(float* to, const void* rows, int64_t is_bfloat16, int64_t row,
                       const float* norm, int64_t size, float eps) {
    if (is_bfloat16 != 0)
      widen_row(to, static_cast<const BFloat16*>(rows) + row * size, size);
    else
      widen_row(to, static_cast<const float*>(rows) + row * size, size);
    norm_row(to, to, norm, size, eps, false);
  }

  std::vector<float> inputs, x, normed, heads, attended, weights, gates, gated, logits;

  static constexpr int64_t kMostDim = 256;

 private:
  static void fit(std::vector<float>& values, int64_t num) {
    if (static_cast<int64_t>(values.size()) < num) values.resize(static_cast<size_t>(num));
  }

  int64_t weights_stride_ = 0;

  static float dot(const float* a, const float* b, int64_t num) {
    Lanes total{};
    for (int64_t i = 0; i < num; i += kLanes) total = multiply_add(load(a + i), load(b + i), total);
    return sum(total);
  }

  // One query head of a row.
  static void attend(const HydraHead& head, const Thought& thought, int64_t index,
                     const float* query, float* weights, float* to) {
    const Memory& memory = *thought.memory;
    const int64_t dim = head.head_dim, own_head = index / (head.num_heads / head.num_keys);
    const int64_t num_slots = (memory.num_used() + kLanes - 1) / kLanes * kLanes;
    const int64_t num_path = thought.num_path;
    const int64_t num = num_slots + (num_path + kLanes - 1) / kLanes * kLanes;
    std::fill(weights + num_slots, weights + num, -INFINITY);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    const float* keys = memory.keys(own_head, dim);
    in_groups(num_slots, [&](int64_t slot, auto num_sums) {
      Lanes scores[num_sums] = {};
      for (int64_t i = 0; i < dim; ++i)
        for (int k = 0; k < num_sums; ++k)
          scores[k] = multiply_add(
              all(query[i]), load(keys + i * memory.stride() + slot + k * kLanes), scores[k]);
      for (int k = 0; k < num_sums; ++k) store(weights + slot + k * kLanes, scores[k] * scale);
    });
    for (int64_t slot = 0; slot < num_slots; ++slot)
      if (!memory.is_seen_from(thought.place, slot)) weights[slot] = -INFINITY;
    const Thought* at = &thought;
    for (int64_t step = 0; step < num_path; ++step, at = at->before)
      weights[num_slots + step] = scale * dot(query, at->keys.data() + own_head * dim, dim);
    Lanes tops = all(-INFINITY), totals{};
    for (int64_t i = 0; i < num; i += kLanes) tops = largest(tops, load(weights + i));
    const float top = largest(tops);
    if (!(top > -INFINITY)) {  // nothing is seen, or no number
      std::fill(to, to + dim, top == -INFINITY ? 0.0f : top);
      return;
    }
    for (int64_t i = 0; i < num; i += kLanes) {
      const Lanes own = exponential(load(weights + i) - top);
      store(weights + i, own);
      totals = totals + own;
    }
    const float factor = 1.0f / sum(totals);
    const float* values = memory.values(own_head, dim);
    in_groups(dim, [&](int64_t i, auto num_sums) {
      Lanes found[num_sums] = {};
      const auto add = [&](float weight, const float* from) {
        for (int k = 0; k < num_sums; ++k)
          found[k] = multiply_add(all(weight), load(from + k * kLanes), found[k]);
      };
      for (int64_t slot = 0; slot < num_slots; ++slot) add(weights[slot], values + slot * dim + i);
      const Thought* own = &thought;
      for (int64_t step = 0; step < num_path; ++step, own = own->before)
        add(weights[num_slots + step], own->values.data() + own_head * dim + i);
      for (int k = 0; k < num_sums; ++k) store(to + i + k * kLanes, found[k] * factor);
    });
  }

  // Calls act(i, n) for `num` values, n lanes of them at a time: one sum alone would wait for itself.
  template <typename Act>
  static void in_groups(int64_t num, const Act& act) {
    constexpr int kAtOnce = 4;
    for (int64_t i = 0; i < num; i += kAtOnce * kLanes)
      with_constant<kAtOnce>(std::min<int64_t>(kAtOnce, (num - i) / kLanes),
                             [&](auto num_sums) { act(i, num_sums); });
  }
};

// The end of a text that is to be read: features of the tokens before its last ones.
struct TextEnd {
  Memory* memory;
  Features features;
  const int64_t* last_tokens;
  int64_t num_tokens;  // of the text
  Thought* thought;    // what the head makes of it is put here
};

// What a head makes of the ends of texts. Its weights are read once for all of them.
class Reading {
 public:
  // Of the tokens behind the texts: [ends, score.outputs], until it is called again. Their places go
  // to their memories.
  float* read(const HydraHead& head, const std::vector<TextEnd>& ends, int64_t num_threads) {
    take(head, ends);
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    {
      multiply<float>(head.join, rows_.x.data(), rows_.inputs.data(),
                      static_cast<int64_t>(places_.size()));
      rows_.split_heads(head, places_);
#pragma omp single
      remember(head);
      rows_.finish(head, thoughts_);
    }
    for (size_t i = 0; i < thoughts_.size(); ++i)
      std::copy_n(rows_.x.data() + static_cast<int64_t>(i) * head.size(), head.size(),
                  thoughts_[i]->state.data());
    return rows_.logits.data();
  }

 private:
  void take(const HydraHead& head, const std::vector<TextEnd>& ends) {
    const int64_t size = head.size(), width = head.join.inputs;
    const int64_t num_layers = head.num_values / size;
    ends_ = ends;
    places_.clear();
    last_rows_.clear();
    thoughts_.clear();
    for (const TextEnd& end : ends) {
      const int64_t num = end.features.num_rows;
      for (int64_t row = 0; row < num; ++row) places_.push_back(end.num_tokens - num + row);
      last_rows_.push_back(static_cast<int64_t>(places_.size()) - 1);
      end.memory->make_room(head);
      end.thought->memory = end.memory;
      end.thought->place = places_.back();
      end.thought->state.resize(static_cast<size_t>(size));
      thoughts_.push_back(end.thought);
    }
    rows_.make_room(head, static_cast<int64_t>(places_.size()), width,
                    static_cast<int64_t>(ends.size()), 0);
    float* to = rows_.inputs.data();
    for (const TextEnd& end : ends)
      for (int64_t row = 0; row < end.features.num_rows; ++row, to += width) {
        for (int64_t i = 0; i < head.num_features; ++i)
          HeadRows::take_row(to + i * size, end.features.values, end.features.is_bfloat16,
                             row * num_layers + head.read_places[i], head.feature_norms + i * size,
                             size, head.eps);
        HeadRows::take_row(to + head.num_features * size, head.embedding,
                           head.embedding_is_bfloat16, end.last_tokens[row], head.embedding_norm,
                           size, head.eps);
      }
  }

  void remember(const HydraHead& head) {
    int64_t row = 0;
    for (const TextEnd& end : ends_)
      for (int64_t i = 0; i < end.features.num_rows; ++i, ++row)
        end.memory->put(head, places_[static_cast<size_t>(row)], rows_.row_keys(head, row),
                        rows_.row_values(head, row));
    rows_.keep(head, last_rows_);
  }

  HeadRows rows_;
  std::vector<TextEnd> ends_;
  std::vector<int64_t> places_, last_rows_;
  std::vector<Thought*> thoughts_;
};

// Goes on from what was read, token by token of several paths.
class ReadingOn {
 public:
  // One more token behind each of some thoughts, which must stay. Returns logits, [rows,
  // score.outputs], until it is called again; the new thoughts are put into `thoughts`.
  float* read(const HydraHead& head, const std::vector<const Thought*>& before,
              const std::vector<int64_t>& tokens, const std::vector<Thought*>& thoughts,
              int64_t num_threads) {
    const int64_t num = static_cast<int64_t>(tokens.size()), size = head.size();
    const int64_t num_own = head.num_keys * head.head_dim;
    std::vector<int64_t> places;
    int64_t depth = 0;
    for (const Thought* from : before) depth = std::max(depth, from->num_path + 1);
    rows_.make_room(head, num, 2 * size, num, depth);
    for (int64_t row = 0; row < num; ++row) {
      const Thought& from = *before[static_cast<size_t>(row)];
      float* to = rows_.inputs.data() + row * 2 * size;
      norm_row(to, from.state.data(), head.state_norm, size, head.eps, false);
      HeadRows::take_row(to + size, head.embedding, head.embedding_is_bfloat16,
                         tokens[static_cast<size_t>(row)], head.next_norm, size, head.eps);
      places.push_back(from.place + 1);
      Thought& own = *thoughts[static_cast<size_t>(row)];
      own.memory = from.memory;
      own.place = from.place + 1;
      own.num_path = from.num_path + 1;
      own.before = &from;
      own.state.resize(static_cast<size_t>(size));
      own.keys.resize(static_cast<size_t>(num_own));
      own.values.resize(static_cast<size_t>(num_own));
    }
    (void)num_threads;
#pragma omp parallel num_threads(num_threads)
    {
      multiply<float>(head.join_on, rows_.x.data(), rows_.inputs.data(), num);
      rows_.split_heads(head, places);
#pragma omp single
      for (int64_t row = 0; row < num; ++row) {
        Thought& own = *thoughts[static_cast<size_t>(row)];
        std::copy_n(rows_.row_keys(head, row), num_own, own.keys.data());
        std::copy_n(rows_.row_values(head, row), num_own, own.values.data());
      }
      rows_.finish(head, thoughts);
    }
    for (int64_t row = 0; row < num; ++row) {
      const float* state = rows_.x.data() + row * size;
      std::copy_n(state, size, thoughts[static_cast<size_t>(row)]->state.data());
    }
    return rows_.logits.data();
  }

 private:
  HeadRows rows_;
};

// What a head says of the token behind a text.
class Guess {
 public:
  // logits: of a reading, which this changes. temperature: that they are divided by. num_top: of
  // the most probable tokens, to be named.
  Guess(const HydraHead& head, float* logits, double temperature, int64_t num_top)
      : head_(&head),
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
  int64_t top(int64_t rank) const { return head_->token_ids[top_[rank]]; }

  // 0 of tokens that are not guessed.
  double probability(int64_t token) const {
    const int64_t place = token < head_->num_tokens ? head_->places[token] : -1;
    if (place < 0) return 0.0;
    const double share = std::exp(static_cast<double>(logits_[place]) - largest_) / total_;
    return std::isfinite(share) ? head_->covered * share : 0.0;
  }

 private:
  const HydraHead* head_;
  const float* logits_;
  int64_t num_top_;
  int64_t top_[kMostGuesses] = {};
  double largest_ = 0.0, total_ = 1.0;
};

}  // namespace blockdraft
