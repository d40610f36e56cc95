// What usually follows the last few tokens of a text, in a table of n-grams and in the text itself,
// and the most probable paths of that. `speculate/drafters/ngram_search.py` says the same in Python.

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <new>
#include <optional>
#include <unordered_map>
#include <vector>

#include "philox.h"
#include "hydra_head.h"
#include "worker.h"

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
  int64_t num_read;  // of them those that are counted; put here
  Stream stream;  // of the first token that is searched
  double temperature;
  Large large;  // of the first place
  Features features;  // of the tokens before the last ones; without, nothing is guessed
  int64_t guess_depth;  // tokens ahead that are guessed at most
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

// What a head says behind one text and behind the paths that are searched there.
class Guesses {
 public:
  void add(int64_t index, const Thought& thought, const Guess& guess) {
    if (!guess.is_known()) return;
    known_.emplace(index, guess);
    thoughts_.emplace(index, &thought);
  }

  // Those of parents, whose logits are written over.
  void forget() { known_.clear(); }

  // Behind a node, -1: behind the text; null where nothing is guessed.
  const Guess* behind(int64_t index) const {
    const auto found = known_.find(index);
    return found == known_.end() ? nullptr : &found->second;
  }

  // Of a node that was guessed behind; else null.
  const Thought* thought(int64_t index) const {
    const auto found = thoughts_.find(index);
    return found == thoughts_.end() ? nullptr : found->second;
  }

  bool has_any() const { return !thoughts_.empty(); }
  Thought& new_thought() { return kept_.emplace_back(); }

 private:
  std::deque<Thought> kept_;
  std::unordered_map<int64_t, const Thought*> thoughts_;
  std::unordered_map<int64_t, Guess> known_;
};

// The search behind one text, token by token.
class PathSearch {
 public:
  PathSearch(const Rules& rules, Search& search) : rules_(rules), search_(search) {}
  PathSearch(const PathSearch&) = delete;  // guesses point at each other
  PathSearch& operator=(const PathSearch&) = delete;

  Guesses guesses;

  // Does nothing after memory was missing.
  template <typename Act>
  void attempt(const Act& act) noexcept {
    if (has_failed_) return;
    try {
      act(*this);
    } catch (const std::bad_alloc&) {
      has_failed_ = true;
    }
  }

  void fail() { has_failed_ = true; }

  // Counts what is new of the text.
  void count() {
    search_.text->read(rules_, search_);
    search_.num_read = search_.num_text;
    newest_.push_back({1.0, -1, -1, 0, Text::ending(search_, search_.num_tokens), 0});
  }

  // That guesses are divided by. Greedy requests have none, and what is likely is likelier still at
  // low temperatures.
  double temperature() const {
    return std::clamp(search_.temperature, rules_.guess_temperature, 1.0);
  }

  bool has_features() const { return !has_failed_ && search_.features.values != nullptr; }

  // What a head reads of the text.
  TextEnd end(Thought& thought) const {
    const int64_t* last = search_.token_ids + search_.num_tokens - search_.features.num_rows;
    return {&search_.text->memory, search_.features, last, search_.num_text, &thought};
  }

  // True while a head may guess behind its newest nodes: it then grows in step with the others.
  bool is_guided() const {
    return !has_failed_ && !is_done() && guesses.has_any() && depth_ < search_.guess_depth;
  }

  // Calls act(node, what a head made of its parent) for those of the newest nodes behind which is
  // guessed.
  template <typename Act>
  void for_guesses(const Act& act) const {
    int64_t num = 0;
    for (const Node& node : newest_) {
      const Thought* parent = guesses.thought(node.parent);
      const bool is_taken = num < rules_.num_guessed_on &&
                            node.probability >= rules_.least_guessed_on &&
                            node.token < rules_.guesser->num_tokens;
      if (parent == nullptr || !is_taken) continue;
      ++num;
      act(node, *parent);
    }
  }

  // Finds what follows the newest nodes.
  void grow() {
    static thread_local Scratch scratch;
    const Large none{nullptr, nullptr, 0};
    const Large& large = depth_ == 0 ? search_.large : none;
    const MarkedLarge marked(scratch.large, large);
    for (const Node& node : newest_) {
      Shares shares = successors(rules_, *search_.text, node.context, scratch, large,
                                 guesses.behind(node.index));
      if (search_.temperature > 0.0) weigh(rules_, search_, scratch.large, large, depth_, shares);
      std::stable_sort(shares.all.begin(), shares.all.end(),
                       [](const Share& a, const Share& b) { return a.value > b.value; });
      for (const Share& share : shares.all) {
        // Sums of shares round, and no child may come before its parent.
        const double probability = node.probability * std::min(share.value, 1.0);
        if (probability < rules_.least_probability) break;
        best_.push_back({probability, num_found_++, node.index, depth_ + 1,
                         followed_by(node.context, share.token), share.token});
      }
    }
    // What is not among the best now never will be, nor what follows it.
    std::sort(best_.begin(), best_.end(), is_better);
    if (static_cast<int64_t>(best_.size()) > search_.num_nodes)
      best_.erase(best_.begin() + search_.num_nodes, best_.end());
    ++depth_;
    newest_.clear();
    for (const Node& node : best_)
      if (node.depth == depth_) newest_.push_back(node);
    guesses.forget();
  }

  void grow_to_end() {
    while (!is_done()) grow();
  }

  // The best paths: tokens, the place of each parent among them or -1, and probabilities.
  void put_down() const {
    search_.num_found = has_failed_ ? -1 : static_cast<int64_t>(best_.size());
    for (int64_t i = 0; i < search_.num_found; ++i) {
      const Node& own = best_[static_cast<size_t>(i)];
      search_.tokens[i] = own.token;
      search_.probabilities[i] = own.probability;
      const auto is_parent = [&](const Node& node) { return node.index == own.parent; };
      const auto parent = std::find_if(best_.begin(), best_.end(), is_parent);
      search_.parents[i] = parent == best_.end() ? -1 : parent - best_.begin();
    }
  }

 private:
  bool is_done() const { return depth_ >= search_.max_depth || newest_.empty(); }

  const Rules& rules_;
  Search& search_;
  std::vector<Node> best_, newest_;
  int64_t depth_ = 0, num_found_ = 0;
  bool has_failed_ = false;
};

// Searches that are made together. A head is asked for all of them at once, since most of its time
// goes into reading its weights.
class Searches {
 public:
  Searches(const Rules& rules, void* const* searches, int64_t num, int64_t num_threads)
      : rules_(rules), num_threads_(num_threads) {
    for (int64_t i = 0; i < num; ++i) all_.emplace_back(rules, *static_cast<Search*>(searches[i]));
  }

  void run() {
    in_turn([](PathSearch& own) { own.count(); });
    together([&] { guess_behind_texts(); });
    while (std::any_of(all_.begin(), all_.end(),
                       [](const PathSearch& own) { return own.is_guided(); })) {
      in_turn([](PathSearch& own) {
        if (own.is_guided()) own.grow();
      });
      together([&] { guess_on(); });
    }
    in_turn([](PathSearch& own) { own.grow_to_end(); });
    for (const PathSearch& own : all_) own.put_down();
  }

 private:
  // Threads share the searches.
  template <typename Act>
  void in_turn(const Act& act) {
    const int64_t num = static_cast<int64_t>(all_.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads_) if (num > 1)
    for (int64_t i = 0; i < num; ++i) all_[static_cast<size_t>(i)].attempt(act);
  }

  // Without memory none goes on: what is read belongs to all.
  template <typename Act>
  void together(const Act& act) {
    try {
      act();
    } catch (const std::bad_alloc&) {
      for (PathSearch& own : all_) own.fail();
    }
  }

  void guess_behind_texts() {
    static thread_local Reading reading;
    if (rules_.guesser == nullptr) return;
    std::vector<TextEnd> ends;
    std::vector<Place> places;
    for (PathSearch& own : all_) {
      if (!own.has_features()) continue;
      ends.push_back(own.end(own.guesses.new_thought()));
      places.push_back({&own, -1, ends.back().thought});
    }
    if (!ends.empty())
      add_guesses(places, reading.read(*rules_.guesser, ends, num_threads_));
  }

  void guess_on() {
    static thread_local ReadingOn reading;
    std::vector<const Thought*> before;
    std::vector<int64_t> tokens;
    std::vector<Thought*> thoughts;
    std::vector<Place> places;
    for (PathSearch& own : all_) {
      if (!own.is_guided()) continue;
      own.for_guesses([&](const Node& node, const Thought& parent) {
        before.push_back(&parent);
        tokens.push_back(node.token);
        thoughts.push_back(&own.guesses.new_thought());
        places.push_back({&own, node.index, thoughts.back()});
      });
    }
    if (!tokens.empty())
      add_guesses(places, reading.read(*rules_.guesser, before, tokens, thoughts, num_threads_));
  }

  // A node of a search, -1: its text, and what the head made of it.
  struct Place {
    PathSearch* search;
    int64_t index;
    const Thought* thought;
  };

  // logits: [places, score.outputs].
  void add_guesses(const std::vector<Place>& places, float* logits) {
    const int64_t num = static_cast<int64_t>(places.size());
    const int64_t num_outputs = rules_.guesser->score.outputs;
    std::vector<std::optional<Guess>> guesses(places.size());
#pragma omp parallel for schedule(dynamic) num_threads(num_threads_) if (num > 1)
    for (int64_t i = 0; i < num; ++i)
      guesses[static_cast<size_t>(i)].emplace(*rules_.guesser, logits + i * num_outputs,
                                              places[static_cast<size_t>(i)].search->temperature(),
                                              rules_.num_guesses);
    for (size_t i = 0; i < places.size(); ++i)
      places[i].search->guesses.add(places[i].index, *places[i].thought, *guesses[i]);
  }

  const Rules& rules_;
  int64_t num_threads_;
  std::deque<PathSearch> all_;
};

// Makes [num] searches, of none of the texts twice.
void make_searches(const Rules& rules, void* const* searches, int64_t num,
                   int64_t num_threads) noexcept {
  try {
    Searches(rules, searches, num, num_threads).run();
  } catch (const std::bad_alloc&) {
    for (int64_t i = 0; i < num; ++i) static_cast<Search*>(searches[i])->num_found = -1;
  }
}

// Searches that the worker makes, while others decide what to do next.
struct SearchesAhead {
  const Rules* rules;
  void* const* searches = nullptr;
  int64_t num = 0;
  Task task{[](void* self) {
              const auto& own = *static_cast<const SearchesAhead*>(self);
              make_searches(*own.rules, own.searches, own.num, 1);
            },
            this};

  explicit SearchesAhead(const Rules* given) : rules(given) {}
};

}  // namespace
}  // namespace blockdraft

extern "C" {

// Null where there is no memory left.
void* blockdraft_text_new() { return new (std::nothrow) blockdraft::Text; }

void blockdraft_text_delete(void* text) { delete static_cast<blockdraft::Text*>(text); }

// By these rules, which must stay. Null where there is no memory left.
void* blockdraft_ahead_new(const void* rules) {
  using namespace blockdraft;
  return new (std::nothrow) SearchesAhead(static_cast<const Rules*>(rules));
}

void blockdraft_ahead_delete(void* ahead) { delete static_cast<blockdraft::SearchesAhead*>(ahead); }

// Lets the worker begin with [num] searches, of none of the texts twice. They and all that they read
// must stay until they are taken.
void blockdraft_search_ahead(void* ahead, void* const* searches, int64_t num) {
  auto& own = *static_cast<blockdraft::SearchesAhead*>(ahead);
  own.task.finish();
  own.searches = searches;
  own.num = num;
  own.task.begin();
}

// Ends what was begun; 1 if the searches were made.
int blockdraft_take_ahead(void* ahead) {
  return static_cast<blockdraft::SearchesAhead*>(ahead)->task.finish() ? 1 : 0;
}

// Nothing is searched ahead any more; what it reads may go from now on.
void blockdraft_end_ahead() {
  if (blockdraft::Worker* worker = blockdraft::Worker::only()) worker->end();
}

// Makes [num] searches, of none of the texts twice, nor of any that is searched ahead.
void blockdraft_ngrams(const void* rules, void* const* searches, int64_t num, int64_t num_threads) {
  using namespace blockdraft;
  make_searches(*static_cast<const Rules*>(rules), searches, num, num_threads);
}

}  // extern "C"
