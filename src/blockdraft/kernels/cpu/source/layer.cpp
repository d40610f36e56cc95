// Products, and whole decoder layers: norm, attention with rotated heads, norm, gated MLP.

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

namespace {

// Less work than this is done before other threads would have woken up.
constexpr int64_t kMinParallelProducts = 1 << 18;

// The values between the steps of a layer, kept from one call to the next.
template <typename T>
T* scratch(int64_t num_values) {
  thread_local std::vector<T> kept;
  if (static_cast<int64_t>(kept.size()) < num_values) kept.resize(static_cast<size_t>(num_values));
  return kept.data();
}

template <typename T, typename Pool>
void run(const Weights& weights, const Plan& plan, const Layer& layer, T* output, const T* hidden,
         const T* cosine, const T* sine, const Pool& keys, const Pool& values) {
  const int64_t num_rows = plan.num_rows, size = weights.qkv.inputs, head_dim = layer.head_dim;
  const int64_t heads = layer.kv_heads * layer.group, width = weights.qkv.outputs;
  const int64_t gates = weights.gate_up.outputs;
  T* normed = scratch<T>(num_rows * (2 * size + width + heads * head_dim + gates + gates / 2));
  T* total = normed + num_rows * size;
  T* qkv = total + num_rows * size;
  T* attended = qkv + num_rows * width;
  T* gate_up = attended + num_rows * heads * head_dim;
  T* gated = gate_up + num_rows * gates;
  const std::vector<Part> parts = parts_of(plan, layer);
  const auto rows = [&](int64_t first) {
    return Rows<const T>{qkv + first * head_dim, width, head_dim};
  };
  const int64_t work = num_rows * size * (width + gates);
  const bool rounds_first = weights.rounds_first != 0;
  (void)work;
#pragma omp parallel num_threads(plan.num_threads) if (work >= kMinParallelProducts)
  {
    norm<T>(normed, nullptr, hidden, nullptr, weights.norm, num_rows, size, weights.eps,
            rounds_first);
    multiply<T>(weights.qkv, qkv, normed, num_rows);
    rotate<T>(qkv, width, cosine, sine, weights.query_norm, weights.key_norm, num_rows, heads,
              layer.kv_heads, head_dim, weights.head_eps, rounds_first);
    write_rows(keys, rows(heads), plan, layer);
    write_rows(values, rows(heads + layer.kv_heads), plan, layer);
    attend<T>(plan, layer, parts, attended, rows(0), keys, values);
    multiply<T>(weights.o, normed, attended, num_rows);
    norm<T>(normed, total, normed, hidden, weights.mlp_norm, num_rows, size, weights.mlp_eps,
            rounds_first);
    multiply<T>(weights.gate_up, gate_up, normed, num_rows);
    gate<T>(gated, gate_up, num_rows, gates / 2);
    multiply<T>(weights.down, normed, gated, num_rows);
    add<T>(output, total, normed, num_rows, size);
  }
}

}  // namespace
}  // namespace blockdraft

extern "C" {

// The inputs that lie side by side in a packed weight, or 0 where other libraries multiply better:
// on machines with narrower registers or with matrix registers, and where this build has one thread.
int64_t blockdraft_product_step(int is_bfloat16) {
#if defined(__AVX512F__) && defined(_OPENMP) && !defined(__AMX_BF16__)
  if (!is_bfloat16) return blockdraft::kStep<float>;
  return BLOCKDRAFT_HAS_PAIRS ? blockdraft::kStep<blockdraft::BFloat16> : 0;
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

// A layer on hidden [plan.num_rows, size]; cosine and sine: [plan.num_rows, head_dim], the sign of
// the rotated first half in the sine. Returns a Refusal; then nothing was read or written.
int blockdraft_layer(int is_bfloat16, const blockdraft::Weights* weights,
                     const blockdraft::Plan* plan, const blockdraft::Layer* layer, void* output,
                     const void* hidden, const void* cosine, const void* sine,
                     const blockdraft::Pools* pools) {
  if (plan->slots == nullptr) return blockdraft::kSlots;
  const blockdraft::Refusal refusal = blockdraft::refusal_of(*plan, *layer);
  if (refusal != blockdraft::kNone) return refusal;
  const auto run = [&](auto value) {
    using T = decltype(value);
    blockdraft::with_pools<T>(*pools, [&](const auto& keys, const auto& values) {
      blockdraft::run(*weights, *plan, *layer, static_cast<T*>(output),
                      static_cast<const T*>(hidden), static_cast<const T*>(cosine),
                      static_cast<const T*>(sine), keys, values);
    });
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
  return blockdraft::kNone;
}

// Layers one behind another, each with its own of what `blockdraft_layer` takes. `states` has room
// for several times the hidden values; the output of a layer goes to the place `places[i]` there,
// which may be that of its input, and is the input of the next layer.
int blockdraft_layers(int is_bfloat16, int64_t num_layers, const blockdraft::Weights* const* weights,
                      const blockdraft::Plan* const* plans, const blockdraft::Layer* const* layers,
                      void* states, const int64_t* places, const void* hidden, const void* cosine,
                      const void* sine, const blockdraft::Pools* const* pools) {
  for (int64_t i = 0; i < num_layers; ++i) {
    const int64_t num_values = plans[i]->num_rows * weights[i]->qkv.inputs;
    void* output = static_cast<char*>(states) + places[i] * num_values * (is_bfloat16 ? 2 : 4);
    const int refusal = blockdraft_layer(is_bfloat16, weights[i], plans[i], layers[i], output, hidden,
                                         cosine, sine, pools[i]);
    if (refusal != blockdraft::kNone) return refusal;
    hidden = output;
  }
  return blockdraft::kNone;
}

}  // extern "C"
