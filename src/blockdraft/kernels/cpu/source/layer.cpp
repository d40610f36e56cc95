// Products, whole decoder layers (norm, attention with rotated heads, norm, gated MLP), and the head
// behind them.

#include <algorithm>
#include <new>

#include "attention.h"
#include "checks.h"
#include "products.h"
#include "rows.h"

namespace blockdraft {

// The weights of a layer. Norms of heads: null if it has none.
struct Weights {
  Product qkv, o, gate_up, down;
  const void* norm;
  const void* mlp_norm;
  const void* query_norm;
  const void* key_norm;
  float eps;
  float mlp_eps;
  float head_eps;
  int rounds_first;  // norms round before their weight is applied, too
};

// What is behind the last layer: a norm, and the product that makes logits.
struct Head {
  Product product;
  const void* norm;
  float eps;
  int rounds_first;
};

// The head of the rows [num] of the last output, in this order, whose logits go to [num, outputs].
struct HeadCall {
  const Head* head;
  const int64_t* rows;
  int64_t num;
  void* logits;
};

namespace {

// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelProducts = 1 << 18;

// Of so few rows every thread makes all norms for itself, which takes less time than to wait for
// each other.
constexpr int64_t kFewRows = 6;

// Values between the steps of layers, kept from one call to the next: shared by all threads, or a
// thread's own.
template <typename T, bool IsShared>
T* scratch(int64_t num_values) {
  thread_local std::vector<T> kept;
  if (static_cast<int64_t>(kept.size()) < num_values) kept.resize(static_cast<size_t>(num_values));
  return kept.data();
}

// Some rows of a plan, which go on alone: of a prompt's last layer only the last row is wanted.
struct Chosen {
  std::vector<int64_t> rows, spans, ranges, paths;
  Plan plan{};
};

// rows: rising, of a plan with ranges.
void choose_rows(Chosen& chosen, const Plan& plan, const int64_t* rows, int64_t num) {
  chosen.rows.assign(rows, rows + num);
  chosen.plan = plan;
  int64_t place = 0;
  for (int64_t span = 0; span < plan.num_spans; ++span) {
    const int64_t* own = plan.spans + 3 * span;
    const int64_t first = place;
    for (; place < num && rows[place] < own[0] + own[1]; ++place)
      chosen.ranges.insert(chosen.ranges.end(), plan.ranges + 2 * rows[place],
                           plan.ranges + 2 * rows[place] + 2);
    if (place == first) continue;
    chosen.spans.insert(chosen.spans.end(), {first, place - first, own[2]});
    if (plan.paths != nullptr)
      chosen.paths.insert(chosen.paths.end(), plan.paths + 2 * span, plan.paths + 2 * span + 2);
  }
  chosen.plan.num_rows = num;
  chosen.plan.num_spans = static_cast<int64_t>(chosen.spans.size()) / 3;
  chosen.plan.spans = chosen.spans.data();
  chosen.plan.ranges = chosen.ranges.data();
  chosen.plan.num_ranges = place;
  chosen.plan.paths = plan.paths == nullptr ? nullptr : chosen.paths.data();
  chosen.plan.slots = nullptr;
}

// One of several layers, on hidden [plan.num_rows, size]. Strides count values.
struct LayerCall {
  const Weights* weights;
  const Plan* plan;
  const Layer* layer;
  const Pools* pools;
  void* output;
  int64_t output_stride;
  const void* hidden;
  int64_t hidden_stride;
  const Chosen* chosen;  // the rows that have an output, side by side there; null: all
  std::vector<Part> parts;

  int64_t size() const { return weights->qkv.inputs; }
  int64_t attended() const { return layer->kv_heads * layer->group * layer->head_dim; }

  // Values between its steps.
  int64_t num_values() const {
    const int64_t gates = weights->gate_up.outputs;
    return plan->num_rows * (3 * size() + weights->qkv.outputs + attended() + gates + gates / 2);
  }

  int64_t work() const {
    return plan->num_rows * size() * (weights->qkv.outputs + weights->gate_up.outputs);
  }
};

// Turns queries and keys, and puts new keys and values where they belong; those of rows that only
// fill up a forward, which may share a slot, go nowhere.
template <typename T, typename Pool>
void rotate_and_write(const Rotation<T>& rotation, const Plan& plan, const Layer& layer,
                      const Pool& keys, const Pool& values) {
  const int64_t first_value = rotation.num_queries + layer.kv_heads;
  const int64_t num_heads = first_value + layer.kv_heads, num_written = num_covered(plan);
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < plan.num_rows; ++row)
    for (int64_t index = 0; index < num_heads; ++index) {
      if (index < first_value) rotation.run(row, index);
      if (index < rotation.num_queries || row >= num_written) continue;
      const int64_t head = index - (index < first_value ? rotation.num_queries : first_value);
      (index < first_value ? keys : values)
          .write(head * layer.head_stride + plan.slots[row] * layer.head_dim,
                 rotation.head(row, index), layer.head_dim);
    }
}

// Shares its work among the threads of the region that calls it. room: of all of them, for
// call.num_values.
template <typename T, typename Pool>
void run(const LayerCall& call, T* room, const T* cosine, const T* sine, const Pool& keys,
         const Pool& values) {
  const Weights& weights = *call.weights;
  const Plan& plan = *call.plan;
  const Layer& layer = *call.layer;
  const int64_t num_rows = plan.num_rows, size = call.size(), head_dim = layer.head_dim;
  const int64_t heads = layer.kv_heads * layer.group, width = weights.qkv.outputs;
  const int64_t gates = weights.gate_up.outputs;
  Strided<const T> hidden{static_cast<const T*>(call.hidden), call.hidden_stride};
  const Strided<T> output{static_cast<T*>(call.output), call.output_stride};
  T *product = room, *qkv = product + num_rows * size, *attended = qkv + num_rows * width;
  T *gate_up = attended + num_rows * call.attended(), *gated = gate_up + num_rows * gates;
  T *normed = nullptr, *total = nullptr;
  const bool rounds_first = weights.rounds_first != 0;
  const auto norm_all = [&](const void* weight, float eps, Strided<const T> input,
                            Strided<const T> residual, int64_t num) {
    const Norm<T> own{static_cast<const T*>(weight), size, eps, rounds_first};
    const bool is_few = num <= kFewRows;
    normed = is_few ? scratch<T, false>(2 * kFewRows * size) : gated + num_rows * gates / 2;
    total = normed + num * size;
    if (!is_few) return norm_rows(own, normed, total, input, residual, num);
    for (int64_t row = 0; row < num; ++row) own.run(normed, total, input, residual, row);
  };
  norm_all(weights.norm, weights.eps, hidden, {nullptr, 0}, num_rows);
  multiply<T>(weights.qkv, qkv, normed, num_rows);
  const Rotation<T> rotation{qkv,
                             width,
                             cosine,
                             sine,
                             static_cast<const T*>(weights.query_norm),
                             static_cast<const T*>(weights.key_norm),
                             heads,
                             head_dim,
                             weights.head_eps,
                             rounds_first};
  rotate_and_write(rotation, plan, layer, keys, values);
  if (call.chosen != nullptr) {
#pragma omp single
    for (int64_t to = 0; to < call.chosen->plan.num_rows; ++to) {
      const int64_t row = call.chosen->rows[static_cast<size_t>(to)];
      if (row != to) std::copy_n(qkv + row * width, heads * head_dim, qkv + to * width);
      if (hidden.row(row) != output.row(to)) std::copy_n(hidden.row(row), size, output.row(to));
    }
    hidden = {output.values, output.stride};
  }
  const Plan& rest = call.chosen == nullptr ? plan : call.chosen->plan;
  const int64_t num = rest.num_rows;
  attend<T>(rest, layer, call.parts, attended, Rows<const T>{qkv, width, head_dim}, keys, values);
  multiply<T>(weights.o, product, attended, num);
  norm_all(weights.mlp_norm, weights.mlp_eps, {product, size}, hidden, num);
  multiply<T>(weights.gate_up, gate_up, normed, num);
  gate<T>(gated, gate_up, num, gates / 2);
  multiply<T>(weights.down, product, gated, num);
  add<T>(output, total, product, num, size);
}

// Shares its work among the threads of the region that calls it. room: for size * call.num values.
template <typename T>
void run_head(const HeadCall& call, T* room, Strided<const T> output) {
  const Head& head = *call.head;
  const int64_t size = head.product.inputs;
  const bool is_few = call.num <= kFewRows;
  T* normed = is_few ? scratch<T, false>(2 * kFewRows * size) : room;
  const auto norm = [&](int64_t i) {
    norm_row(normed + i * size, output.row(call.rows[i]), static_cast<const T*>(head.norm), size,
             head.eps, head.rounds_first != 0);
  };
  if (is_few) {
    for (int64_t i = 0; i < call.num; ++i) norm(i);
  } else {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < call.num; ++i) norm(i);
  }
  multiply<T>(head.product, call.logits, normed, call.num);
}

// All threads stay together from the first layer to the head, or to the last layer if it has none.
template <typename T>
void run_all(const std::vector<LayerCall>& calls, const HeadCall& head, const T* cosine,
             const T* sine) {
  if (calls.empty()) return;
  int64_t num_values = 0, work = 0;
  for (const LayerCall& call : calls) {
    num_values = std::max(num_values, call.num_values());
    work = std::max(work, call.work());
  }
  const LayerCall& last = calls.back();
  if (head.num > 0) {
    num_values = std::max(num_values, head.num * last.size());
    work = std::max(work, head.num * last.size() * head.head->product.outputs);
  }
  T* room = scratch<T, true>(num_values);
  (void)work;
#pragma omp parallel num_threads(calls[0].plan->num_threads) if (work >= kMinParallelProducts)
  {
    for (const LayerCall& call : calls)
      with_pools<T>(*call.pools, [&](const auto& keys, const auto& values) {
        run(call, room, cosine, sine, keys, values);
      });
    if (head.num > 0)
      run_head<T>(head, room, {static_cast<const T*>(last.output), last.output_stride});
  }
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// The inputs that lie side by side in a packed weight, or 0 where other libraries multiply better:
// on machines with narrower registers, and where this build has one thread.
int64_t blockdraft_product_step(int is_bfloat16) {
#if defined(__AVX512F__) && defined(_OPENMP)
  if (!is_bfloat16) return blockdraft::kStep<float>;
  return BLOCKDRAFT_SPLITS_PAIRS ? blockdraft::kInputs<blockdraft::BFloat16, float> : 0;
#elif BLOCKDRAFT_TWO_REGISTERS && defined(_OPENMP)
  return is_bfloat16 ? 0 : blockdraft::kStep<float>;
#else
  (void)is_bfloat16;
  return 0;
#endif
}

// The outputs that lie side by side in a packed weight.
int64_t blockdraft_product_panel() { return blockdraft::kPanel; }

// The inputs that lie side by side in a packed int8 weight, or 0 where there are no products with
// such weights.
int64_t blockdraft_int8_step() {
#if BLOCKDRAFT_HAS_NUMBERS && defined(_OPENMP)
  return blockdraft::kStep<int16_t>;
#else
  return 0;
#endif
}

// The outputs that lie side by side in a packed weight of groups, or 0 where there are no products
// with such weights.
int64_t blockdraft_group_panel() {
#if BLOCKDRAFT_GROUPS
  return blockdraft::kGroupPanel;
#else
  return 0;
#endif
}

// Whether weights for float32 may be held as Narrow.
int blockdraft_reads_narrow() { return blockdraft::kReadsNarrow; }

// Whether products in bfloat16, those of attention among them, run in matrix registers. Asks the
// system, if nobody did before.
int blockdraft_uses_matrices() {
#if BLOCKDRAFT_HAS_MATRICES
  return blockdraft::has_matrices();
#else
  return 0;
#endif
}

// The product of input [num_rows, inputs] with a packed weight.
void blockdraft_multiply(int is_bfloat16, const blockdraft::Product* product, void* output,
                         const void* input, int64_t num_rows, int num_threads) {
  const auto run =
      is_bfloat16 ? blockdraft::multiply<blockdraft::BFloat16> : blockdraft::multiply<float>;
  const int64_t work = num_rows * product->inputs * product->outputs;
  (void)work;
  (void)num_threads;
#pragma omp parallel num_threads(num_threads) if (work >= blockdraft::kMinParallelProducts)
  run(*product, output, input, num_rows);
}

// Layers one behind another, each with its own of weights, plan, layer and pools. hidden:
// [num_rows, size]; cosine and sine: [num_rows, head_dim], the sign of the rotated first half in the
// sine. The output of a layer is the input of the next one. It goes to its place `places[i]` in
// `kept` [num_rows, num_kept, size], or where that is negative to `passed` [num_rows, size]. The last
// output is that of the rows `wanted` alone, rising, side by side in `passed`; null: of all. head: null
// if there is none, else of the rows `scored` of the last output. Returns a Refusal; then nothing was
// read or written.
int blockdraft_layers(int is_bfloat16, int64_t num_layers, const blockdraft::Weights* const* weights,
                      const blockdraft::Plan* const* plans, const blockdraft::Layer* const* layers,
                      void* kept, int64_t num_kept, const int64_t* places, void* passed,
                      const int64_t* wanted, int64_t num_wanted, const void* hidden,
                      const void* cosine, const void* sine,
                      const blockdraft::Pools* const* pools, const blockdraft::Head* head,
                      const int64_t* scored, int64_t num_scored, void* logits) try {
  const blockdraft::HeadCall head_call{head, scored, head == nullptr ? 0 : num_scored, logits};
  std::vector<blockdraft::LayerCall> calls;
  calls.reserve(static_cast<size_t>(num_layers));
  blockdraft::Chosen chosen;
  int64_t hidden_stride = num_layers > 0 ? weights[0]->qkv.inputs : 0;
  for (int64_t i = 0; i < num_layers; ++i) {
    if (plans[i]->slots == nullptr) return blockdraft::kSlots;
    const blockdraft::Refusal refusal = blockdraft::refusal_of(*plans[i], *layers[i]);
    if (refusal != blockdraft::kNone) return refusal;
    const int64_t size = weights[i]->qkv.inputs;
    void* output = passed;
    int64_t output_stride = size;
    if (places[i] >= 0) {
      output = static_cast<char*>(kept) + places[i] * size * (is_bfloat16 ? 2 : 4);
      output_stride = num_kept * size;
    }
    const bool chooses = wanted != nullptr && i == num_layers - 1;
    if (chooses && plans[i]->ranges == nullptr) return blockdraft::kRanges;
    if (chooses) blockdraft::choose_rows(chosen, *plans[i], wanted, num_wanted);
    calls.push_back({weights[i], plans[i], layers[i], pools[i], output, output_stride, hidden,
                     hidden_stride, chooses ? &chosen : nullptr,
                     blockdraft::parts_of(chooses ? chosen.plan : *plans[i], *layers[i])});
    hidden = output;
    hidden_stride = output_stride;
  }
  if (is_bfloat16)
    blockdraft::run_all(calls, head_call, static_cast<const blockdraft::BFloat16*>(cosine),
                        static_cast<const blockdraft::BFloat16*>(sine));
  else
    blockdraft::run_all(calls, head_call, static_cast<const float*>(cosine),
                        static_cast<const float*>(sine));
  return blockdraft::kNone;
} catch (const std::bad_alloc&) {  // of what is taken before threads begin, which is nearly all
  return blockdraft::kMemory;
}

// One of them.
int blockdraft_layer(int is_bfloat16, const blockdraft::Weights* weights,
                     const blockdraft::Plan* plan, const blockdraft::Layer* layer, void* output,
                     const void* hidden, const void* cosine, const void* sine,
                     const blockdraft::Pools* pools) {
  const int64_t place = -1;
  return blockdraft_layers(is_bfloat16, 1, &weights, &plan, &layer, nullptr, 0, &place, output,
                           nullptr, 0, hidden, cosine, sine, &pools, nullptr, nullptr, 0, nullptr);
}

}  // extern "C"
