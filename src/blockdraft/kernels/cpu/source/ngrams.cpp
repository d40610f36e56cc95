// What usually follows the last few tokens of a text, in a table of n-grams and in the text itself,
// and the most probable paths of that. `speculate/drafters/ngram_search.py` says the same in Python.

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#include "philox.h"
#include "hydra_head.h"

namespace blockdraft {

struct Text;

namespace {

constexpr int kLongest = 3;  // tokens of a context

// Contexts of one length in a table, and their successors, the most probable first.
struct TablePart {
  const uint32_t* keys;  // rising, a hash of each context
  int64_t num;
  const int64_t* starts;  // [num + 1], of each context's successors
  const uint8_t* rests;   // levels of what is left to shorter contexts
  const uint32_t* tokens;
  const uint8_t* levels;
};

// How far a text is believed about what follows in it.
struct Belief {
  double known_token;       // so many times as probable is what the text already holds
  double priors[kLongest];  // observations that the shorter context is worth
};

struct Rules {
  TablePart parts[kLongest];
  const uint8_t* frequencies;  // [num_frequencies], levels of tokens whatever stands before them
  int64_t num_frequencies;
  const double* probabilities;  // [256], of levels
  int64_t head;                 // successors that are looked at whatever their noise
  Belief beside_table;
  Belief beside_guess;          // which has seen the text too
  double least_probability;
  double most_noise;
  int64_t max_remembered;  // successors of a context in the text that count, the last ones
  const HydraHead* guesser;  // null if nothing guesses
  double guess_weight;     // beside the table
  int64_t num_guesses;     // the most probable ones, looked at whoever else names them
  double guess_temperature;  // the lowest that guesses are sharpened to
  int64_t guess_depth;       // tokens ahead that are guessed at most
  int64_t num_guessed_on;    // paths of a length behind which is guessed, the most probable ones
  double least_guessed_on;   // probability of such a path
};

// The tokens with the largest noise of a place, rising; or none.
struct Large {
  const int64_t* tokens;
  const double* noise;
  int64_t num;
};

struct Search {
  const int64_t* token_ids;  // the end of the text: what was counted before, then what was not
  int64_t num_known;
  int64_t num_tokens;
  int64_t num_text;  // tokens of all of it
  Stream stream;  // of the first token that is searched
  double temperature;
  Large large;  // of the first place
  Features features;  // of the tokens before the last ones; without, nothing is guessed
  int64_t num_nodes;
  int64_t max_depth;
  int64_t* tokens;  // [num_nodes] each of what is found
  int64_t* parents;
  double* probabilities;
  Text* text;
  int64_t num_found;  // put here; -1 where there is no memory left
};

// The last tokens of a text, each plus one, the latest last; 0 where there are none.
using Context = std::array<uint64_t, kLongest>;

struct ContextHash {
  size_t operator()(const Context& context) const {
    uint64_t value = 0;
    for (const uint64_t token : context) {
      value = (value ^ token) * 0x9E3779B97F4A7C15u;
      value ^= value >> 32;
    }
    return static_cast<size_t>(value);
  }
};

Context shorter(Context context, int length) {
  std::fill(context.begin(), context.end() - length, 0);
  return context;
}

Context followed_by(const Context& context, int64_t token) {
  return {context[1], context[2], static_cast<uint64_t>(token) + 1};
}

int length_of(const Context& context) {
  return static_cast<int>(std::count_if(context.begin(), context.end(),
                                        [](uint64_t token) { return token != 0; }));
}

struct Share {
  int64_t token;
  double value;
};

// In the order in which their tokens were met.
struct Shares {
  std::vector<Share> all;

  double total() const {
    double total = 0.0;
    for (const Share& share : all) total += share.value;
    return total;
  }
};

// The places of tokens among shares, counted from 1.
//
// Every look at a list of the whole vocabulary would leave the caches; this table stays in them.
class Places {
 public:
  // Of a token; 0 if it is new, and its own from then on.
  int64_t& at(int64_t token) {
    if (2 * used_.size() >= slots_.size()) grow();
    const size_t index = find(token);
    if (slots_[index].token != token) {
      slots_[index] = {token, 0};
      used_.push_back(index);
    }
    return slots_[index].place;
  }

  bool holds(int64_t token) const { return !used_.empty() && slots_[find(token)].token == token; }

  void clear() {
    for (const size_t index : used_) slots_[index].token = kNone;
    used_.clear();
  }

 private:
  static constexpr int64_t kNone = -1;
  static constexpr size_t kFirstSize = 256;

  struct Slot {
    int64_t token = kNone;
    int64_t place = 0;
  };

  // The slot of a token, or the one that it would take.
  size_t find(int64_t token) const {
    const uint64_t hash = static_cast<uint64_t>(token) * 0x9E3779B97F4A7C15u;
    size_t index = static_cast<size_t>(hash >> 32) & (slots_.size() - 1);
    while (slots_[index].token != kNone && slots_[index].token != token)
      index = (index + 1) & (slots_.size() - 1);
    return index;
  }

  void grow() {
    std::vector<Slot> kept(std::max(kFirstSize, 2 * slots_.size()));
    std::vector<size_t> used;
    used.reserve(kept.size() / 2);  // so that no token is taken in without being remembered
    kept.swap(slots_);
    for (const size_t before : used_) {
      used.push_back(find(kept[before].token));
      slots_[used.back()] = kept[before];
    }
    used_.swap(used);
  }

  std::vector<Slot> slots_;  // a power of two
  std::vector<size_t> used_;
};

// Adds shares of tokens, each in one place.
class Sum {
 public:
  Sum(Places& places, Shares& shares) : places_(places), shares_(shares) {}
  Sum(const Sum&) = delete;
  Sum& operator=(const Sum&) = delete;
  ~Sum() { places_.clear(); }

  bool holds(int64_t token) const { return places_.holds(token); }

  void add(int64_t token, double value) {
    int64_t& place = places_.at(token);
    if (place == 0) {
      shares_.all.push_back({token, 0.0});
      place = static_cast<int64_t>(shares_.all.size());
    }
    shares_.all[static_cast<size_t>(place - 1)].value += value;
  }

 private:
  Places& places_;
  Shares& shares_;
};

// A set of tokens, as far as the largest: a bit each.
class Tokens {
 public:
  bool holds(int64_t token) const {
    const size_t index = static_cast<size_t>(token);
    return index < held_.size() && held_[index];
  }

  void add(int64_t token) {
    const size_t index = static_cast<size_t>(token);
    if (index >= held_.size()) held_.resize(index + 1);
    held_[index] = true;
  }

  // Of one that is held.
  void remove(int64_t token) { held_[static_cast<size_t>(token)] = false; }

 private:
  std::vector<bool> held_;
};

// What a thread keeps from text to text; both are empty in between.
struct Scratch {
  Places places;
  Tokens large;
};

struct Node {
  double probability;
  int64_t index;  // in the order of finding
  int64_t parent;
  int64_t depth;
  Context context;
  int64_t token;
};

}  // namespace

// What followed what in one text, and what a head makes of its end.
struct Text {
  Tokens tokens;
  Memory memory;  // of the head
  double temperature = 1.0;             // of guesses, since the last search
  std::unique_ptr<ReadingAhead> ahead;  // none before the first is begun
  std::unordered_map<Context, std::vector<int64_t>, ContextHash> followed;

  void read(const Rules& rules, const Search& search) {
    for (int64_t place = search.num_known; place < search.num_tokens; ++place) {
      const int64_t token = search.token_ids[place];
      tokens.add(token);
      const Context context = ending(search, place);
      for (int length = 1; length <= length_of(context); ++length) {
        std::vector<int64_t>& known = followed[shorter(context, length)];
        known.push_back(token);
        if (static_cast<int64_t>(known.size()) > rules.max_remembered) known.erase(known.begin());
      }
    }
  }

  // The tokens before a place.
  static Context ending(const Search& search, int64_t place) {
    Context context{};
    for (int64_t i = std::max<int64_t>(0, place - kLongest); i < place; ++i)
      context = followed_by(context, search.token_ids[i]);
    return context;
  }
};

namespace {

// Their noise counts from here to the end of its life.
class MarkedLarge {
 public:
  MarkedLarge(Tokens& marked, const Large& large) : marked_(marked), large_(large) {
    // Room for all before any is marked: without memory none would be cleared.
    if (large.num != 0) marked.add(large.tokens[large.num - 1]);
    for (int64_t i = 0; i < large.num; ++i) marked.add(large.tokens[i]);
  }
  MarkedLarge(const MarkedLarge&) = delete;
  MarkedLarge& operator=(const MarkedLarge&) = delete;
  ~MarkedLarge() {
    for (int64_t i = 0; i < large_.num; ++i) marked_.remove(large_.tokens[i]);
  }

 private:
  Tokens& marked_;
  const Large& large_;
};

// The place of the first key that is no less, or `num`.
//
// Keys are hashes, so a key stands near its share of their range; a search by halves would leave the
// caches a dozen times. The second guess corrects the first by how far the key there is off.
int64_t first_not_less(const TablePart& part, uint32_t key) {
  if (part.num == 0) return 0;
  const double places_per_key = static_cast<double>(part.num) * 0x1p-32;
  int64_t guess = std::min(static_cast<int64_t>(key * places_per_key), part.num - 1);
  const double off = static_cast<double>(key) - static_cast<double>(part.keys[guess]);
  guess += static_cast<int64_t>(off * places_per_key);
  guess = std::clamp<int64_t>(guess, 0, part.num);
  int64_t first = guess, last = guess;
  for (int64_t step = 8; first > 0 && part.keys[first - 1] >= key; step *= 2)
    first = std::max<int64_t>(0, first - step);
  for (int64_t step = 8; last < part.num && part.keys[last] < key; step *= 2)
    last = std::min(part.num, last + step);
  return std::lower_bound(part.keys + first, part.keys + last, key) - part.keys;
}

// The heads of the known ends of a context, and what else may follow of `others`.
void add_table(const Rules& rules, const Context& context, const Tokens& large, const Large& others,
               Shares& shares, Sum& sum) {
  std::array<uint32_t, kLongest> keys{};
  uint64_t value = 0;
  for (int length = 1; length <= length_of(context); ++length) {
    value = (value ^ context[kLongest - length]) * 0x9E3779B97F4A7C15u;
    value ^= value >> 29;
    keys[length - 1] = static_cast<uint32_t>(value >> 32);
  }
  double mass = 1.0;
  for (int length = length_of(context); length > 0; --length) {
    const TablePart& part = rules.parts[length - 1];
    const int64_t place = first_not_less(part, keys[length - 1]);
    if (place == part.num || part.keys[place] != keys[length - 1]) continue;
    const int64_t first = part.starts[place], last = part.starts[place + 1];
    for (int64_t i = first; i < last; ++i) {
      if (i - first >= rules.head && (others.num == 0 || !large.holds(part.tokens[i]))) {
        if (others.num == 0) break;
        continue;
      }
      sum.add(part.tokens[i], mass * rules.probabilities[part.levels[i]]);
    }
    mass *= rules.probabilities[part.rests[place]];
  }
  const auto add_frequency = [&](int64_t token) {
    if (token < rules.num_frequencies)
      sum.add(token, mass * rules.probabilities[rules.frequencies[token]]);
  };
  for (size_t i = 0, num = shares.all.size(); i < num; ++i) add_frequency(shares.all[i].token);
  for (int64_t i = 0; i < others.num; ++i)
    if (!sum.holds(others.tokens[i])) add_frequency(others.tokens[i]);
}

// Of the tokens that are known, and of the most probable ones, what a head guesses.
void mix_guess(const Rules& rules, const Guess& guess, Shares& shares, Sum& sum) {
  const double weight = rules.guess_weight;
  for (Share& share : shares.all)
    share.value = (1.0 - weight) * share.value + weight * guess.probability(share.token);
  for (int64_t i = 0; i < guess.num_top(); ++i)
    if (const int64_t token = guess.top(i); !sum.holds(token))
      sum.add(token, weight * guess.probability(token));
}

// Those that the text holds are more probable, all others less.
void favor(const Belief& belief, const Text& text, Shares& shares) {
  const double rest = std::max(0.0, 1.0 - shares.total());
  for (Share& share : shares.all)
    if (text.tokens.holds(share.token)) share.value *= belief.known_token;
  const double total = shares.total() + rest;
  for (Share& share : shares.all) share.value /= total;
}

Shares successors(const Rules& rules, const Text& text, const Context& context, Scratch& scratch,
                  const Large& others, const Guess* guess) {
  Shares found;
  Sum sum(scratch.places, found);
  add_table(rules, context, scratch.large, others, found, sum);
  if (guess != nullptr) mix_guess(rules, *guess, found, sum);
  const Belief& belief = guess == nullptr ? rules.beside_table : rules.beside_guess;
  favor(belief, text, found);
  for (int length = 1; length <= length_of(context); ++length) {
    const auto known = text.followed.find(shorter(context, length));
    if (known == text.followed.end()) break;  // nor did anything follow a longer context
    const double prior = belief.priors[length - 1];
    const double total = static_cast<double>(known->second.size()) + prior;
    for (Share& share : found.all) share.value *= prior / total;
    for (const int64_t token : known->second) sum.add(token, 1.0 / total);
  }
  return found;
}

double noise_of(const Search& search, const Tokens& marked, const Large& large, int64_t depth,
                int64_t token) {
  if (large.num != 0 && marked.holds(token)) {
    const int64_t* end = large.tokens + large.num;
    return large.noise[std::lower_bound(large.tokens, end, token) - large.tokens];
  }
  const Stream stream{search.stream.seed, search.stream.sample_index,
                      search.stream.position + static_cast<uint64_t>(depth)};
  uint64_t words[1][kWords];
  const int64_t block = token / kWords;
  draw<1>(words, stream, &block);
  return gumbel_noise(words[0][token % kWords]);
}

// Weighted with the noise that will choose among them; one alone stays as it is.
void weigh(const Rules& rules, const Search& search, const Tokens& marked, const Large& large,
           int64_t depth, Shares& shares) {
  if (shares.all.size() < 2) return;
  // All other tokens count without noise.
  const double rest = std::max(0.0, 1.0 - shares.total());
  for (Share& share : shares.all) {
    const double noise = search.temperature * noise_of(search, marked, large, depth, share.token);
    share.value *= std::exp(std::clamp(noise, -rules.most_noise, rules.most_noise));
  }
  const double total = shares.total() + rest;
  for (Share& share : shares.all) share.value /= total;
}

// A parent comes before its children: it is no less probable, and was found before them.
bool is_better(const Node& one, const Node& other) {
  if (one.probability != other.probability) return one.probability > other.probability;
  return one.index < other.index;
}

// What a head says behind a text and behind the paths that are searched there.
class Guesses {
 public:
  Guesses(const Rules& rules, Text& text, const Search& search, int64_t num_threads)
      : rules_(rules), text_(text), num_threads_(num_threads) {
    // Greedy requests have none, and what is likely is likelier still at low temperatures.
    text.temperature = std::clamp(search.temperature, rules.guess_temperature, 1.0);
    if (rules.guesser == nullptr || search.features.values == nullptr) return;
    const Guess* ahead =
        text.ahead == nullptr ? nullptr : text.ahead->guess(search.num_text, text.temperature);
    if (ahead != nullptr) {
      add(-1, text.ahead->end(), *ahead);
    } else {
      static thread_local Reading reading;
      reading.take(*rules.guesser, text.memory, search.features,
                   search.token_ids + search.num_tokens - search.features.num_rows,
                   search.num_text);
      add(-1, reading.end(), guess_of(reading.logits(*rules.guesser, text.memory, num_threads)));
    }
  }

  // Guesses behind the likely ones of these nodes, all of one depth.
  void go_on(const std::vector<Node>& nodes) {
    static thread_local ReadingOn reading;
    known_.clear();  // of parents
    if (thoughts_.empty() || nodes.empty() || nodes[0].depth >= rules_.guess_depth) return;
    std::vector<const Thought*> before;
    std::vector<int64_t> tokens, indices;
    for (const Node& node : nodes) {
      const auto parent = thoughts_.find(node.parent);
      const bool is_taken = static_cast<int64_t>(tokens.size()) < rules_.num_guessed_on &&
                            node.probability >= rules_.least_guessed_on &&
                            node.token < rules_.guesser->num_tokens;
      if (parent == thoughts_.end() || !is_taken) continue;
      before.push_back(parent->second);
      tokens.push_back(node.token);
      indices.push_back(node.index);
    }
    if (tokens.empty()) return;
    std::vector<Thought*> read;
    for (size_t i = 0; i < tokens.size(); ++i) read.push_back(&kept_.emplace_back());
    float* logits =
        reading.read(*rules_.guesser, text_.memory, before, tokens, read, num_threads_);
    for (size_t i = 0; i < tokens.size(); ++i)
      add(indices[i], *read[i],
          guess_of(logits + static_cast<int64_t>(i) * rules_.guesser->score.outputs));
  }

  // Behind a node, -1: behind the text; null where nothing is guessed.
  const Guess* behind(int64_t index) const {
    const auto found = known_.find(index);
    return found == known_.end() ? nullptr : &found->second;
  }

 private:
  Guess guess_of(float* logits) const {
    return Guess(*rules_.guesser, logits, text_.temperature, rules_.num_guesses);
  }

  void add(int64_t index, const Thought& thought, const Guess& guess) {
    if (!guess.is_known()) return;
    known_.emplace(index, guess);
    thoughts_.emplace(index, &thought);
  }

  const Rules& rules_;
  Text& text_;
  int64_t num_threads_;
  std::deque<Thought> kept_;
  std::unordered_map<int64_t, const Thought*> thoughts_;
  std::unordered_map<int64_t, Guess> known_;
};

std::vector<Node> best_paths(const Rules& rules, Text& text, const Search& search,
                             int64_t num_threads) {
  static thread_local Scratch scratch;
  std::vector<Node> best;
  std::vector<Node> newest{{1.0, -1, -1, 0, Text::ending(search, search.num_tokens), 0}};
  Guesses guesses(rules, text, search, num_threads);
  int64_t num_found = 0;
  for (int64_t depth = 0; depth < search.max_depth && !newest.empty(); ++depth) {
    const Large none{nullptr, nullptr, 0};
    const Large& large = depth == 0 ? search.large : none;
    const MarkedLarge marked(scratch.large, large);
    for (const Node& node : newest) {
      Shares shares =
          successors(rules, text, node.context, scratch, large, guesses.behind(node.index));
      if (search.temperature > 0.0) weigh(rules, search, scratch.large, large, depth, shares);
      std::stable_sort(shares.all.begin(), shares.all.end(),
                       [](const Share& a, const Share& b) { return a.value > b.value; });
      for (const Share& share : shares.all) {
        // Sums of shares round, and no child may come before its parent.
        const double probability = node.probability * std::min(share.value, 1.0);
        if (probability < rules.least_probability) break;
        best.push_back({probability, num_found++, node.index, depth + 1,
                        followed_by(node.context, share.token), share.token});
      }
    }
    // What is not among the best now never will be, nor what follows it.
    std::sort(best.begin(), best.end(), is_better);
    if (static_cast<int64_t>(best.size()) > search.num_nodes)
      best.erase(best.begin() + search.num_nodes, best.end());
    newest.clear();
    for (const Node& node : best)
      if (node.depth == depth + 1) newest.push_back(node);
    if (depth + 1 < search.max_depth) guesses.go_on(newest);
  }
  return best;
}

// Counts what is new of a text, and finds the best paths behind it: tokens, the place of each parent
// among them or -1, and probabilities.
void find_paths(const Rules& rules, Search& search, int64_t num_threads) {
  try {
    search.text->read(rules, search);
    const std::vector<Node> best = best_paths(rules, *search.text, search, num_threads);
    for (size_t i = 0; i < best.size(); ++i) {
      search.tokens[i] = best[i].token;
      search.probabilities[i] = best[i].probability;
      const auto is_parent = [&](const Node& node) { return node.index == best[i].parent; };
      const auto parent = std::find_if(best.begin(), best.end(), is_parent);
      search.parents[i] = parent == best.end() ? -1 : parent - best.begin();
    }
    search.num_found = static_cast<int64_t>(best.size());
  } catch (const std::bad_alloc&) {
    search.num_found = -1;
  }
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// Null where there is no memory left.
void* blockdraft_text_new() { return new (std::nothrow) blockdraft::Text; }

void blockdraft_text_delete(void* text) { delete static_cast<blockdraft::Text*>(text); }

// Begins to guess behind a text of so many tokens, from the features of the tokens before the last
// ones, which are given; whoever searches there need not wait so long.
void blockdraft_guess_ahead(const void* rules, void* text, const void* features, int is_bfloat16,
                            int64_t num_rows, const int64_t* last_tokens, int64_t num_tokens) {
  using namespace blockdraft;
  Text& own = *static_cast<Text*>(text);
  std::unique_ptr<ReadingAhead>& ahead = own.ahead;
  try {
    if (ahead == nullptr) ahead = std::make_unique<ReadingAhead>();
    ahead->begin(*static_cast<const Rules*>(rules)->guesser, own.memory,
                 {features, is_bfloat16, num_rows}, last_tokens, num_tokens, own.temperature,
                 static_cast<const Rules*>(rules)->num_guesses);
  } catch (const std::bad_alloc&) {
    ahead = nullptr;
  }
}

// Makes [num] searches, of none of the texts twice.
void blockdraft_ngrams(const void* rules, void* const* searches, int64_t num, int64_t num_threads) {
  using namespace blockdraft;
  const Rules& known = *static_cast<const Rules*>(rules);
  const auto search = [&](int64_t i) -> Search& { return *static_cast<Search*>(searches[i]); };
  bool guesses = false;
  for (int64_t i = 0; i < num; ++i) guesses = guesses || search(i).features.values != nullptr;
  // Threads share the texts, or the products of one text after another where there are fewer texts
  // than threads. Not as a loop of one thread: parallel products within would begin new threads.
  if (num == 1 || (num < num_threads && guesses)) {
    for (int64_t i = 0; i < num; ++i) find_paths(known, search(i), num_threads);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
  for (int64_t i = 0; i < num; ++i) find_paths(known, search(i), 1);
}

}  // extern "C"
