// Attention over keys and values in tiles of 64 slots: the pages of a pool, or one long buffer.
//
// A query sees the keys of a range of absolute positions, tile by tile in the order of the
// positions, with a running softmax in float32. Nothing else enters its value: neither the queries
// beside it, nor the number of threads, nor what lies in slots that it does not see.

#pragma once

#include <algorithm>
#include <vector>

#include "pools.h"
#include "rows.h"

namespace blockdraft {

// What all layers of a forward share that look at keys alike.
struct Plan {
  int64_t num_rows;
  int64_t num_spans;
  const int64_t* spans;   // [num_spans, 3]: first row, number of rows, its first entry of `pages`,
                          // which those of one sequence share if they stand one behind another
  const int64_t* pages;   // [num_pages]; null: the tiles of the one span lie side by side
  int64_t num_pages;
  const int64_t* ranges;  // [num_ranges, 2]: first key seen and the one behind the last; or null
  int64_t num_ranges;     // as many as there are rows in spans
  const float* bias;      // without ranges: added to the scores, [num_rows, num_keys]; or null
  int64_t bias_stride;
  int64_t num_keys;
  const int64_t* slots;  // [num_rows]: where new keys and values go
  const int64_t* paths;  // [num_spans, 2]: of each span the first position whose key lies at a slot
                         // of its own, and the entry of `path_slots` for it; or null
  const int64_t* path_slots;  // [num_path_slots], for positions that follow each other
  int64_t num_path_slots;
  int64_t num_threads;
};

struct Layer {
  int64_t kv_heads;
  int64_t group;  // query heads that share a K/V head
  int64_t head_dim;
  int64_t head_stride;  // values from one K/V head of the pool to the next
  int64_t num_slots;    // of each K/V head
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // [heads] or null
};

constexpr int64_t kMaxQueries = 32;
constexpr int kBlock = 6;  // queries whose sums fit the registers together
// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelScores = 1 << 14;

// Rows of heads somewhere in a tensor; strides count values.
template <typename T>
struct Rows {
  T* values;
  int64_t row_stride;
  int64_t head_stride;

  T* at(int64_t row, int64_t head) const { return values + row * row_stride + head * head_stride; }
};

// Queries `begin` to `end` of the spans of one sequence, from `first_span` up to `end_span`, and of
// one K/V head, counted row by row, in each by head.
struct Part {
  int64_t first_span;
  int64_t end_span;
  int64_t kv_head;
  int64_t begin;
  int64_t end;
};

// The queries of a part and what they have gathered so far.
struct State {
#if BLOCKDRAFT_HAS_MATRICES
  MatrixRegisters registers;
#endif
  int64_t num;
  Range ranges[kMaxQueries];
  const float* bias[kMaxQueries];
  Range in_tile[kMaxQueries];
  float largest[kMaxQueries];
  alignas(64) float totals[kMaxQueries * kLanes];
  alignas(64) float queries[kMaxQueries * kMaxHeadDim];  // in words, or in float32
  alignas(64) float sums[kMaxQueries * kMaxHeadDim];
  alignas(64) float scores[kMaxQueries * kTile];
  alignas(64) float columns[kMaxHeadDim * kTile];  // keys of a tile, and its values
};

// The keys that a row sees. A bias of minus infinity at either end hides a key as a range does.
inline Range range_of(const Plan& plan, int64_t row) {
  if (plan.ranges != nullptr) return {plan.ranges[2 * row], plan.ranges[2 * row + 1]};
  Range seen{0, plan.num_keys};
  if (plan.bias == nullptr) return seen;
  const float* bias = plan.bias + row * plan.bias_stride;
  while (seen.end > 0 && bias[seen.end - 1] == -INFINITY) --seen.end;
  while (seen.first < seen.end && bias[seen.first] == -INFINITY) ++seen.first;
  return seen;
}

template <typename T>
void put_words(float* to, const T* from, int64_t num_words) {
  for (int64_t word = 0; word < num_words; word += kLanes) {
    const int64_t num = num_words - word < kLanes ? num_words - word : kLanes;
    store_some(to + word, load_words(from + word * kStep<T>, num), num);
  }
}

template <typename T>
void begin(State& state, const Plan& plan, const Layer& layer, const Part& part,
           const Rows<const T>& queries) {
  const int64_t head_dim = layer.head_dim, first_row = plan.spans[3 * part.first_span];
  state.num = part.end - part.begin;
  for (int64_t i = 0; i < state.num; ++i) {
    const int64_t row = first_row + (part.begin + i) / layer.group;
    const int64_t head = part.kv_head * layer.group + (part.begin + i) % layer.group;
    const bool is_known = i > 0 && (part.begin + i) % layer.group != 0;  // as the head before it
    state.ranges[i] = is_known ? state.ranges[i - 1] : range_of(plan, row);
    const bool has_bias = plan.ranges == nullptr && plan.bias != nullptr;
    state.bias[i] = has_bias ? plan.bias + row * plan.bias_stride : nullptr;
    state.largest[i] = -INFINITY;
    store(state.totals + i * kLanes, Lanes{});
    const T* query = queries.at(row, head);
    if (splits_keys<T>(head_dim))
      widen_row(state.queries + i * head_dim, query, head_dim);
    else
      put_words(state.queries + i * (head_dim / kStep<T>), query, head_dim / kStep<T>);
    for (int64_t d = 0; d < head_dim; d += kLanes) store(state.sums + i * head_dim + d, Lanes{});
  }
}

// Turns the scores of a query with a tile into weights relative to the largest score so far.
inline void weigh(State& state, const Layer& layer, int64_t index, int64_t tile_start) {
  const Range seen = state.in_tile[index];
  float* scores = state.scores + index * kTile;
  for (int i = 0; i < kTileLanes; ++i)
    store(scores + i * kLanes, load(scores + i * kLanes) * layer.scale);
  if (layer.softcap != 0.0f)
    for (int64_t i = seen.first; i < seen.end; ++i)
      scores[i] = std::tanh(scores[i] / layer.softcap) * layer.softcap;
  if (state.bias[index] != nullptr)
    for (int64_t i = seen.first; i < seen.end; ++i) scores[i] += state.bias[index][tile_start + i];
  for (int64_t i = 0; i < seen.first; ++i) scores[i] = -INFINITY;
  for (int64_t i = seen.end; i < kTile; ++i) scores[i] = -INFINITY;
  Lanes most = load(scores);
  for (int i = 1; i < kTileLanes; ++i) most = largest(most, load(scores + i * kLanes));
  const float in_tile = largest(most), before = state.largest[index];
  const float now = in_tile > before ? in_tile : before;
  const Lanes base = all(now == -INFINITY ? 0.0f : now);  // a bias may hide a whole tile
  Lanes total = load(state.totals + index * kLanes);
  if (now > before && before != -INFINITY) {
    const Lanes factor = exponential(all(before - now));
    total = total * factor;
    float* sums = state.sums + index * layer.head_dim;
    for (int64_t d = 0; d < layer.head_dim; d += kLanes) store(sums + d, load(sums + d) * factor);
  }
  for (int i = 0; i < kTileLanes; ++i) {
    const Lanes weight = exponential(load(scores + i * kLanes) - base);
    store(scores + i * kLanes, weight);
    total = total + weight;
  }
  state.largest[index] = now;
  store(state.totals + index * kLanes, total);
}

// Calls act(first query, number of queries as a constant) for blocks of queries, which share what is
// read.
template <typename Act>
void in_blocks(int64_t num, const Act& act) {
  for (int64_t first = 0; first < num; first += kBlock)
    with_constant<kBlock>(num - first < kBlock ? num - first : kBlock,
                          [&](auto constant) { act(first, constant); });
}

// Scores of queries with the columns of a tile.
template <typename T>
void multiply_keys(State& state, Range queries, int64_t head_dim) {
  const int64_t num_words = head_dim / kStep<T>;
  in_blocks(queries.end - queries.first, [&](int64_t in_block, auto num) {
    const int64_t first = queries.first + in_block;
    float* scores = state.scores + first * kTile;
    if (splits_keys<T>(head_dim))
      multiply_keys<T, float, num>(scores, state.queries + first * head_dim, state.columns,
                                   num_words);
    else
      multiply_keys<T, T, num>(scores, state.queries + first * num_words, state.columns, num_words);
  });
}

// The keys of a tile that all of these queries see.
inline Range common_of(const State& state, Range queries) {
  Range common{0, kTile};
  for (int64_t i = queries.first; i < queries.end; ++i) {
    const Range own = state.in_tile[i];
    common.first = own.first > common.first ? own.first : common.first;
    common.end = own.end < common.end ? own.end : common.end;
  }
  return common.first < common.end ? common : Range{kTile, kTile};
}

// Those keys that not all of a block see come singly, in order. So a query's sums do not depend on
// the block.
template <typename T>
void add_tile(State& state, Range queries, const T* values, int64_t head_dim) {
  in_blocks(queries.end - queries.first, [&](int64_t in_block, auto num) {
    const int64_t first = queries.first + in_block;
    const Range common = common_of(state, {first, first + num});
    Range seen{kTile, 0};
    for (int i = 0; i < num; ++i) {
      const Range own = state.in_tile[first + i];
      seen.first = own.first < seen.first ? own.first : seen.first;
      seen.end = own.end > seen.end ? own.end : seen.end;
    }
    const auto alone = [&](bool is_before) {
      for (int64_t i = first; i < first + num; ++i) {
        Range own = state.in_tile[i];
        if (is_before)
          own.end = own.end < common.first ? own.end : common.first;
        else
          own.first = own.first > common.end ? own.first : common.end;
        add_values<T, 1>(state.sums + i * head_dim, state.scores + i * kTile, values, own,
                         head_dim);
      }
    };
    if (seen.first < common.first) alone(true);
    add_values<T, num>(state.sums + first * head_dim, state.scores + first * kTile, values, common,
                       head_dim);
    if (seen.end > common.end) alone(false);
  });
}

#if BLOCKDRAFT_HAS_MATRICES
// Scores, weights and weighted values of a tile whose keys are in its columns already. What a query
// does not see has weight 0, which leaves its sums as they are, but for the sign of zeros.
inline void attend_in_matrices(State& state, Range queries, const Layer& layer, int64_t tile_start,
                               const BFloat16* values, Range seen) {
  const int64_t head_dim = layer.head_dim, num_words = head_dim / kStep<BFloat16>;
  // Behind the words of the keys, of which there are as many.
  float* pairs = state.columns + num_words * kTile;
  // 0 times what is no number is none. Where somebody might not see one, each gets values of its own.
  const Range common = common_of(state, queries);
  const bool is_alone =
      hold_no_number(values, {seen.first, std::min(common.first, seen.end)}, head_dim) ||
      hold_no_number(values, {std::max(common.end, seen.first), seen.end}, head_dim);
  const auto in_registers = [&](int64_t most, const auto& act) {
    for (int64_t first = queries.first; first < queries.end; first += most) {
      state.registers.set(std::min(queries.end - first, most));
      act(first);
    }
  };
  in_registers(kMatrixRows, [&](int64_t first) {
    multiply_keys_in_matrices(state.scores + first * kTile, state.queries + first * num_words,
                              state.columns, num_words);
  });
  if (!is_alone) pair_values(pairs, values, seen, head_dim);
  SplitWeights<kMaxQueries> weights;
  for (int64_t i = queries.first; i < queries.end; ++i) {
    weigh(state, layer, i, tile_start);  // all are 0 where it sees nothing
    weights.put(i, state.scores + i * kTile);
  }
  in_registers(is_alone ? 1 : kMatrixRows, [&](int64_t first) {
    if (is_alone) pair_values(pairs, values, state.in_tile[first], head_dim);
    add_values_in_matrices(state.sums + first * head_dim, weights.high + first * kTile,
                           weights.low + first * kTile, pairs, head_dim);
  });
}
#endif

// Keys and values of a tile.
template <typename T>
struct Tile {
  const T* keys;
  const T* values;
};

// read(seen): the Tile, of which that range is seen.
template <typename T, typename Read>
void attend_tile(State& state, Range queries, const Layer& layer, int64_t tile_start,
                 const Read& read) {
  Range seen{kTile, 0};
  for (int64_t i = queries.first; i < queries.end; ++i) {
    const Range own = state.ranges[i];
    const int64_t first = own.first > tile_start ? own.first - tile_start : 0;
    const int64_t end = own.end - tile_start < kTile ? own.end - tile_start : kTile;
    state.in_tile[i] = first < end ? Range{first, end} : Range{kTile, kTile};
    if (first >= end) continue;
    seen.first = first < seen.first ? first : seen.first;
    seen.end = end > seen.end ? end : seen.end;
  }
  if (seen.first >= seen.end) return;
  const Tile<T> tile = read(seen);
  transpose_keys(state.columns, tile.keys, seen, layer.head_dim);
#if BLOCKDRAFT_HAS_MATRICES
  if constexpr (std::is_same_v<T, BFloat16>)
    if (attends_in_matrices(layer.head_dim))
      return attend_in_matrices(state, queries, layer, tile_start, tile.values, seen);
#endif
  multiply_keys<T>(state, queries, layer.head_dim);
  for (int64_t i = queries.first; i < queries.end; ++i)
    if (state.in_tile[i].first < state.in_tile[i].end) weigh(state, layer, i, tile_start);
  if constexpr (!std::is_same_v<T, float>)
    if (queries.end - queries.first > kBlock) {  // widened once for all blocks
      float* values = state.columns;
      for (int64_t i = seen.first * layer.head_dim; i < seen.end * layer.head_dim; i += kLanes)
        store(values + i, load(tile.values + i));
      return add_tile<float>(state, queries, values, layer.head_dim);
    }
  add_tile(state, queries, tile.values, layer.head_dim);
}

template <typename T>
void finish(State& state, const Plan& plan, const Layer& layer, const Part& part, T* output) {
  const int64_t head_dim = layer.head_dim, heads = layer.kv_heads * layer.group;
  for (int64_t i = 0; i < state.num; ++i) {
    const int64_t row = plan.spans[3 * part.first_span] + (part.begin + i) / layer.group;
    const int64_t head = part.kv_head * layer.group + (part.begin + i) % layer.group;
    float factor = 1.0f, total = sum(load(state.totals + i * kLanes));
    if (layer.sinks != nullptr) {  // it takes its share and gives nothing
      const float sink = layer.sinks[head], largest = state.largest[i];
      const float most = sink > largest ? sink : largest;
      factor = exponential(all(largest - most))[0];
      total = total * factor + exponential(all(sink - most))[0];
    }
    factor /= total;
    T* to = output + (row * heads + head) * head_dim;
    // Zeros are positive: a tile that only others see adds 0, which turns a sum of -0 into one of 0.
    for (int64_t d = 0; d < head_dim; d += kLanes)
      store(to + d, load(state.sums + i * head_dim + d) * factor + 0.0f);
  }
}

// The keys or values of a tile, those of a path from where they lie. Only what is seen is there.
template <typename T, typename Pool>
const T* gather_tile(std::vector<T>& gathered, const Pool& pool, int64_t page, int64_t head,
                     const int64_t* path, const int64_t* path_slots, int64_t tile_start, Range seen,
                     int64_t head_dim) {
  if (gathered.empty()) gathered.resize(kMaxHeadDim * kTile);
  for (int64_t place = seen.first; place < seen.end; ++place) {
    const int64_t in_path = tile_start + place - path[0];
    const int64_t from = in_path < 0 ? page + place * head_dim
                                     : head + path_slots[path[1] + in_path] * head_dim;
    pool.read(gathered.data() + place * head_dim, from, head_dim);
  }
  return gathered.data();
}

// The queries of a part that are of one span, counted from the first of the part.
inline Range queries_of(const Plan& plan, const Layer& layer, const Part& part, int64_t span) {
  const int64_t before = plan.spans[3 * span] - plan.spans[3 * part.first_span];
  const int64_t first = before * layer.group - part.begin;
  const int64_t end = first + plan.spans[3 * span + 1] * layer.group, num = part.end - part.begin;
  return {first > 0 ? first : 0, end < num ? end : num};
}

// Positions that some of these queries see.
inline Range seen_by(const State& state, Range queries) {
  Range seen{INT64_MAX, 0};
  for (int64_t i = queries.first; i < queries.end; ++i) {
    seen.first = state.ranges[i].first < seen.first ? state.ranges[i].first : seen.first;
    seen.end = state.ranges[i].end > seen.end ? state.ranges[i].end : seen.end;
  }
  return seen;
}

// Where the keys of all spans of a sequence end that lie at the same places.
inline int64_t common_end(const Plan& plan, const Part& part, Range seen) {
  int64_t end = seen.end;
  for (int64_t span = part.first_span; plan.paths != nullptr && span < part.end_span; ++span)
    end = plan.paths[2 * span] < end ? plan.paths[2 * span] : end;
  return end;
}

// The spans of a sequence read the same keys but for those of their own paths, which lie in the last
// tiles: all others are transposed once for all of them.
template <typename T, typename Pool>
void attend_part(const Plan& plan, const Layer& layer, const Part& part,
                 const Rows<const T>& queries, const Pool& keys, const Pool& values, T* output) {
  State state;
  begin(state, plan, layer, part, queries);
  const Range all_queries{0, state.num}, seen = seen_by(state, all_queries);
  const int64_t end = common_end(plan, part, seen), head_dim = layer.head_dim;
  const int64_t* pages =
      plan.pages == nullptr ? nullptr : plan.pages + plan.spans[3 * part.first_span + 2];
  const int64_t head = part.kv_head * layer.head_stride;
  const auto place_of = [&](int64_t tile) {
    return head + (pages == nullptr ? tile : pages[tile]) * kTile * head_dim;
  };
  thread_local std::vector<T> tile_keys, tile_values;
  const auto attend_whole = [&](Range own, int64_t tile) {
    const int64_t at = place_of(tile);
    attend_tile<T>(state, own, layer, tile * kTile, [&](Range in_tile) {
      // The processor alone would wait for each: it does not see from page to page.
      values.fetch(at, head_dim);
      if ((tile + 1) * kTile < seen.end) keys.fetch(place_of(tile + 1), head_dim);
      return Tile<T>{keys.tile(tile_keys, at, in_tile, head_dim),
                     values.tile(tile_values, at, in_tile, head_dim)};
    });
  };
  int64_t tile = seen.first / kTile;
  for (; tile * kTile < seen.end; ++tile) {
    const int64_t tile_end = (tile + 1) * kTile;
    if ((tile_end < seen.end ? tile_end : seen.end) > end) break;
    attend_whole(all_queries, tile);
  }
  const int64_t first_left = tile;
  for (int64_t span = part.first_span; span < part.end_span; ++span) {
    const Range own = queries_of(plan, layer, part, span);
    if (own.first >= own.end) continue;
    const Range own_seen = seen_by(state, own);
    for (tile = first_left; tile * kTile < own_seen.end; ++tile) {
      const int64_t at = place_of(tile), tile_start = tile * kTile;
      const int64_t tile_end = tile_start + kTile < own_seen.end ? tile_start + kTile : own_seen.end;
      const int64_t* path = plan.paths == nullptr ? nullptr : plan.paths + 2 * span;
      if (path == nullptr || tile_end <= path[0]) {
        attend_whole(own, tile);
        continue;
      }
      const auto gather = [&](std::vector<T>& gathered, const Pool& pool, Range in_tile) {
        return gather_tile(gathered, pool, at, head, path, plan.path_slots, tile_start, in_tile,
                           head_dim);
      };
      attend_tile<T>(state, own, layer, tile_start, [&](Range in_tile) {
        return Tile<T>{gather(tile_keys, keys, in_tile), gather(tile_values, values, in_tile)};
      });
    }
  }
  finish(state, plan, layer, part, output);
}

// Each part of a head reads its keys anew, so heads are left whole. Only of the last few, too few for
// all threads, the queries are shared out, so that no thread waits for a whole head.
inline std::vector<Part> parts_of(const Plan& plan, const Layer& layer) {
  std::vector<Range> sequences;  // their spans
  for (int64_t span = 0; span < plan.num_spans; ++span) {
    const bool follows = span > 0 && plan.pages != nullptr &&
                         plan.spans[3 * span + 2] == plan.spans[3 * (span - 1) + 2];
    if (follows)
      sequences.back().end = span + 1;
    else
      sequences.push_back({span, span + 1});
  }
  std::vector<Part> parts;
  const int64_t num_heads = static_cast<int64_t>(sequences.size()) * layer.kv_heads;
  const int64_t num_shared = num_heads % plan.num_threads;
  for (int64_t head = 0; head < num_heads; ++head) {
    const Range spans = sequences[static_cast<size_t>(head / layer.kv_heads)];
    const int64_t* last = plan.spans + 3 * (spans.end - 1);
    const int64_t num_queries = (last[0] + last[1] - plan.spans[3 * spans.first]) * layer.group;
    const int64_t shares =
        head < num_heads - num_shared ? 1 : (plan.num_threads + num_shared - 1) / num_shared;
    int64_t most = (num_queries + shares - 1) / shares;
    if (most > kMaxQueries) most = kMaxQueries;
    for (int64_t begin = 0; begin < num_queries; begin += most)
      parts.push_back({spans.first, spans.end, head % layer.kv_heads, begin,
                       begin + most < num_queries ? begin + most : num_queries});
  }
  return parts;
}

inline int64_t num_covered(const Plan& plan) {
  int64_t num = 0;
  for (int64_t span = 0; span < plan.num_spans; ++span) num += plan.spans[3 * span + 1];
  return num;
}

// What follows shares its work among the threads of the region that calls it.

template <typename T, typename Pool>
void write_rows(const Pool& pool, const Rows<const T>& rows, const Plan& plan, const Layer& layer) {
#pragma omp for schedule(static)
  for (int64_t head = 0; head < layer.kv_heads; ++head)
    for (int64_t row = 0; row < plan.num_rows; ++row)
      pool.write(head * layer.head_stride + plan.slots[row] * layer.head_dim, rows.at(row, head),
                 layer.head_dim);
}

template <typename T, typename Pool>
void attend(const Plan& plan, const Layer& layer, const std::vector<Part>& parts, T* output,
            const Rows<const T>& queries, const Pool& keys, const Pool& values) {
  // Nobody asks what comes of rows that only fill up a forward, but it must be numbers.
  const int64_t row_size = layer.kv_heads * layer.group * layer.head_dim;
#pragma omp single nowait
  for (int64_t i = num_covered(plan) * row_size; i < plan.num_rows * row_size; ++i) output[i] = T{};
  const int64_t num_parts = static_cast<int64_t>(parts.size());
#pragma omp for schedule(dynamic, 1)
  for (int64_t i = 0; i < num_parts; ++i)
    attend_part(plan, layer, parts[static_cast<size_t>(i)], queries, keys, values, output);
}

}  // namespace blockdraft
