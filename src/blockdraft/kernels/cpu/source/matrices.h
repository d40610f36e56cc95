// Matrix registers (Intel's AMX): sixteen rows of 64 bytes in each of eight.
//
// One instruction multiplies up to sixteen rows of 32 bfloat16 values with the weights of sixteen
// outputs for them. The sums of a row take the same steps whatever rows share a register.

#pragma once

#include "lanes.h"

#if BLOCKDRAFT_HAS_PAIRS && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define BLOCKDRAFT_HAS_MATRICES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define BLOCKDRAFT_HAS_MATRICES 0
#endif

namespace blockdraft {

#if BLOCKDRAFT_HAS_MATRICES
constexpr int64_t kMatrixRows = 16;
constexpr int64_t kMatrixInputs = 32;
// The outputs of three registers, which share one with rows.
constexpr int64_t kMatrixOutputs = 3 * kLanes;
// Of all these outputs, the weights for two inputs, which lie side by side.
constexpr int64_t kPairBytes = kMatrixOutputs * 2 * static_cast<int64_t>(sizeof(BFloat16));
constexpr int64_t kStepBytes = kPairBytes * kMatrixInputs / 2;

// Whether the system lets this process use them. It must be asked once for all threads; it refuses
// where a thread's stack for signals has no room for them.
inline bool has_matrices() {
  constexpr long kAsk = 0x1023, kData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool is_allowed = syscall(SYS_arch_prctl, kAsk, kData) == 0;
  return is_allowed;
}

// What the compiler does not know of: the instructions below read and write memory.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// The registers of this thread: 0 to 6 for a block of rows, their sums or what is multiplied; 7 for
// what sixteen outputs multiply it with. Others may use them before and after.
class MatrixRegisters {
 public:
  MatrixRegisters() = default;
  explicit MatrixRegisters(int64_t num_rows) { set(num_rows); }
  // A thread without values there is switched faster.
  ~MatrixRegisters() {
    if (num_rows_ != 0) _tile_release();
  }
  MatrixRegisters(const MatrixRegisters&) = delete;
  MatrixRegisters& operator=(const MatrixRegisters&) = delete;

  // num_rows: of a block. What the registers hold is lost if there were others.
  void set(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } sizes;
    for (int i = 0; i < 8; ++i) {
      sizes.bytes[i] = kCacheLine;
      sizes.rows[i] = static_cast<uint8_t>(i == 7 ? kMatrixRows : num_rows);
    }
    settle_memory();
    _tile_loadconfig(&sizes);
  }

 private:
  int64_t num_rows_ = 0;
};

// Adds the products of one or two blocks of rows, `stride` bytes apart, and weights for 32 inputs.
template <int kBlocks>
void add_matrices(const BFloat16* const* blocks, int64_t stride, const char* weights) {
  _tile_loadd(6, blocks[0], stride);
  _tile_loadd(7, weights, kPairBytes);
  _tile_dpbf16ps(0, 6, 7);
  _tile_loadd(7, weights + kCacheLine, kPairBytes);
  _tile_dpbf16ps(1, 6, 7);
  _tile_loadd(7, weights + 2 * kCacheLine, kPairBytes);
  _tile_dpbf16ps(2, 6, 7);
  if constexpr (kBlocks == 2) {  // back to the first outputs
    _tile_loadd(6, blocks[1], stride);
    _tile_dpbf16ps(5, 6, 7);
    _tile_loadd(7, weights + kCacheLine, kPairBytes);
    _tile_dpbf16ps(4, 6, 7);
    _tile_loadd(7, weights, kPairBytes);
    _tile_dpbf16ps(3, 6, 7);
  }
}

// sums[block][row][output] of one or two blocks of rows [num_rows, inputs] and a panel of weights.
// fetch(): called before each step over the inputs.
template <int kBlocks, typename Fetch>
void multiply_matrices(float* sums, const BFloat16* const* blocks, int64_t num_rows, int64_t inputs,
                       const char* panel, const Fetch& fetch) {
  const int64_t stride = inputs * static_cast<int64_t>(sizeof(BFloat16));
  const int64_t num_whole = inputs / kMatrixInputs, rest = inputs % kMatrixInputs;
  settle_memory();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  const BFloat16* from[2] = {blocks[0], blocks[kBlocks - 1]};
  for (int64_t i = 0; i < num_whole; ++i) {
    fetch();
    add_matrices<kBlocks>(from, stride, panel + i * kStepBytes);
    from[0] += kMatrixInputs;
    from[1] += kMatrixInputs;
  }
  if (rest != 0) {  // with zeros behind them
    BFloat16 last_rows[kBlocks][kMatrixRows * kMatrixInputs] = {};
    char last_weights[kStepBytes] = {};
    for (int block = 0; block < kBlocks; ++block)
      for (int64_t row = 0; row < num_rows; ++row)
        std::memcpy(last_rows[block] + row * kMatrixInputs, from[block] + row * inputs,
                    static_cast<size_t>(rest) * sizeof(BFloat16));
    std::memcpy(last_weights, panel + num_whole * kStepBytes,
                static_cast<size_t>(rest / 2 * kPairBytes));
    const BFloat16* const last[2] = {last_rows[0], last_rows[kBlocks - 1]};
    settle_memory();
    add_matrices<kBlocks>(last, kMatrixInputs * sizeof(BFloat16), last_weights);
  }
  constexpr int64_t kSumBytes = kMatrixOutputs * static_cast<int64_t>(sizeof(float));
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kLanes, kSumBytes);
  _tile_stored(2, sums + 2 * kLanes, kSumBytes);
  if constexpr (kBlocks == 2) {
    float* second = sums + kMatrixRows * kMatrixOutputs;
    _tile_stored(3, second, kSumBytes);
    _tile_stored(4, second + kLanes, kSumBytes);
    _tile_stored(5, second + 2 * kLanes, kSumBytes);
  }
  settle_memory();
}
#endif

}  // namespace blockdraft
