// What usually follows the last few tokens of a text, in a table of n-grams and in the text itself,
// and the most probable paths of that. `speculate/drafters/ngram_search.py` says the same in Python.

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "philox.h"

namespace blockdraft {
namespace {

constexpr int kLongest = 3;     // tokens of a context
constexpr int kSuccessors = 4;  // that a table keeps of a context

// Contexts of one length in a table.
struct TablePart {
  const uint32_t* keys;  // rising, a hash of each context
  int64_t num;
  const uint32_t* tokens;  // [num, kSuccessors], the most probable first
  const uint8_t* levels;   // their probabilities in a byte, 0 behind the last
};

struct Rules {
  TablePart parts[kLongest];
  double known_token;       // so many times as probable is what the text already holds
  double priors[kLongest];  // observations that the shorter context is worth
  double least_probability;
  double most_noise;
  int64_t max_remembered;  // successors of a context that count, the last ones
};

struct Search {
  const int64_t* token_ids;  // the end of the text: what was counted before, then what was not
  int64_t num_known;
  int64_t num_tokens;
  Stream stream;  // of the first token that is searched
  double temperature;
  int64_t num_nodes;
  int64_t max_depth;
  int64_t* tokens;  // [num_nodes] each of what is found
  int64_t* parents;
  double* probabilities;
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

using Shares = std::vector<Share>;

double total_of(const Shares& shares) {
  double total = 0.0;
  for (const Share& share : shares) total += share.value;
  return total;
}

struct Node {
  double probability;
  int64_t index;  // in the order of finding
  int64_t parent;
  int64_t depth;
  Context context;
  int64_t token;
};

}  // namespace

// What followed what in one text.
struct Text {
  std::unordered_set<int64_t> tokens;
  std::unordered_map<Context, std::vector<int64_t>, ContextHash> followed;

  void read(const Rules& rules, const Search& search) {
    for (int64_t place = search.num_known; place < search.num_tokens; ++place) {
      const int64_t token = search.token_ids[place];
      tokens.insert(token);
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

// Of the longest known end of a context.
Shares in_table(const Rules& rules, const Context& context) {
  std::array<uint32_t, kLongest> keys{};
  uint64_t value = 0;
  for (int length = 1; length <= length_of(context); ++length) {
    value = (value ^ context[kLongest - length]) * 0x9E3779B97F4A7C15u;
    value ^= value >> 29;
    keys[length - 1] = static_cast<uint32_t>(value >> 32);
  }
  for (int length = length_of(context); length > 0; --length) {
    const TablePart& part = rules.parts[length - 1];
    const uint32_t* end = part.keys + part.num;
    const uint32_t* at = std::lower_bound(part.keys, end, keys[length - 1]);
    if (at == end || *at != keys[length - 1]) continue;
    Shares found;
    for (int64_t i = (at - part.keys) * kSuccessors, last = i + kSuccessors; i < last; ++i)
      if (part.levels[i] != 0) found.push_back({part.tokens[i], (part.levels[i] + 0.5) / 256.0});
    return found;
  }
  return {};
}

// Those that the text holds are more probable, all others less.
void favor(const Rules& rules, const Text& text, Shares& shares) {
  const double rest = std::max(0.0, 1.0 - total_of(shares));
  for (Share& share : shares)
    if (text.tokens.count(share.token) != 0) share.value *= rules.known_token;
  const double total = total_of(shares) + rest;
  for (Share& share : shares) share.value /= total;
}

Shares successors(const Rules& rules, const Text& text, const Context& context) {
  Shares found = in_table(rules, context);
  favor(rules, text, found);
  for (int length = 1; length <= length_of(context); ++length) {
    const auto known = text.followed.find(shorter(context, length));
    if (known == text.followed.end()) break;  // nor did anything follow a longer context
    const double prior = rules.priors[length - 1];
    const double total = static_cast<double>(known->second.size()) + prior;
    for (Share& share : found) share.value *= prior / total;
    for (const int64_t token : known->second) {
      const auto same = [&](const Share& share) { return share.token == token; };
      auto at = std::find_if(found.begin(), found.end(), same);
      if (at == found.end()) at = found.insert(found.end(), {token, 0.0});
      at->value += 1.0 / total;
    }
  }
  return found;
}

// Weighted with the noise that will choose among them; one alone stays as it is.
void weigh(const Rules& rules, const Search& search, int64_t depth, Shares& shares) {
  if (shares.size() < 2) return;
  // All other tokens count without noise.
  const double rest = std::max(0.0, 1.0 - total_of(shares));
  const Stream stream{search.stream.seed, search.stream.sample_index,
                      search.stream.position + static_cast<uint64_t>(depth)};
  for (Share& share : shares) {
    uint64_t words[1][kWords];
    const int64_t block = share.token / kWords;
    draw<1>(words, stream, &block);
    const double uniform =
        (static_cast<double>(words[0][share.token % kWords] >> 12) + 0.5) * 0x1p-52;
    const double noise = search.temperature * -std::log(-std::log1p(-uniform));
    share.value *= std::exp(std::clamp(noise, -rules.most_noise, rules.most_noise));
  }
  const double total = total_of(shares) + rest;
  for (Share& share : shares) share.value /= total;
}

// A parent comes before its children: it is no less probable, and was found before them.
bool is_better(const Node& one, const Node& other) {
  if (one.probability != other.probability) return one.probability > other.probability;
  return one.index < other.index;
}

std::vector<Node> best_paths(const Rules& rules, const Text& text, const Search& search) {
  std::vector<Node> best;
  std::vector<Node> newest{{1.0, -1, -1, 0, Text::ending(search, search.num_tokens), 0}};
  int64_t num_found = 0;
  for (int64_t depth = 0; depth < search.max_depth && !newest.empty(); ++depth) {
    for (const Node& node : newest) {
      Shares shares = successors(rules, text, node.context);
      if (search.temperature > 0.0) weigh(rules, search, depth, shares);
      std::stable_sort(shares.begin(), shares.end(),
                       [](const Share& a, const Share& b) { return a.value > b.value; });
      for (const Share& share : shares) {
        const double probability = node.probability * share.value;
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
  }
  return best;
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// Null where there is no memory left.
void* blockdraft_text_new() { return new (std::nothrow) blockdraft::Text; }

void blockdraft_text_delete(void* text) { delete static_cast<blockdraft::Text*>(text); }

// Counts what is new of a text, and finds the best paths behind it: tokens, the place of each parent
// among them or -1, and probabilities. Returns how many, or -1 where there is no memory left.
int64_t blockdraft_ngrams(const void* rules, void* text, const void* search) {
  using namespace blockdraft;
  const Rules& known = *static_cast<const Rules*>(rules);
  const Search& asked = *static_cast<const Search*>(search);
  try {
    Text& own = *static_cast<Text*>(text);
    own.read(known, asked);
    const std::vector<Node> best = best_paths(known, own, asked);
    for (size_t i = 0; i < best.size(); ++i) {
      asked.tokens[i] = best[i].token;
      asked.probabilities[i] = best[i].probability;
      const auto is_parent = [&](const Node& node) { return node.index == best[i].parent; };
      const auto parent = std::find_if(best.begin(), best.end(), is_parent);
      asked.parents[i] = parent == best.end() ? -1 : parent - best.begin();
    }
    return static_cast<int64_t>(best.size());
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
