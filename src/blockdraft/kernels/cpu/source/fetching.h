// What is asked of memory before it is needed. No value depends on it.

#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "lanes.h"

namespace blockdraft {

// Weights are fetched so many bytes before few rows are multiplied with them, which memory binds: the
// processor alone does not ask for enough of it at once. Panels lie one behind another.
constexpr int64_t kFetchedAhead = 8192;
// Where nothing is fetched past the caches, lanes fetch in two steps: Intel's first-level cache alone has
// room for too few lines that are on their way. The second level asks for more by itself, on several pages
// at once; so the lines of the pages of a window are fetched in turns, a window ahead.
constexpr int64_t kFetchedNear = 3072;
constexpr int64_t kPage = 4096;
constexpr int64_t kPagesInTurns = 4;
constexpr int64_t kWindow = kPagesInTurns * kPage;

// Cache lines that hold so many bytes.
constexpr int num_lines(int64_t bytes) {
  return static_cast<int>((bytes + kCacheLine - 1) / kCacheLine);
}

// Into which caches is fetched what a product reads soon.
enum class Into {
  kNone,    // what is read once in a pass is not to push out what is read again before the next one
  kFirst,   // all levels
  kSecond,  // all but the first
  kTurns,   // as kSecond, of several pages in turns
  kBoth,    // as kTurns, a window ahead; and nearer by the first level too
};

// The line of a window whose turn it is when all come to `from`, which lies in it.
inline const char* in_turns(const char* from) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(from), line = at % kWindow / kCacheLine;
  return reinterpret_cast<const char*>(at - at % kWindow + line % kPagesInTurns * kPage +
                                       line / kPagesInTurns * kCacheLine);
}

// Cache lines that are fetched with each step over the inputs.
template <int kNum, Into kInto>
struct FetchedLines {
  // Inlined in any case: the compiler leaves out calls of what does nothing but fetch.
  [[gnu::always_inline]] static void fetch(const char* from) {
    constexpr int kLevel = kInto == Into::kNone ? 0 : kInto == Into::kFirst ? 3 : 2;
#pragma GCC unroll 16
    for (int i = 0; i < kNum; ++i) {
      const char* line = from + i * kCacheLine;
      if constexpr (kInto == Into::kTurns || kInto == Into::kBoth)
        __builtin_prefetch(in_turns(line), 0, kLevel);
      else
        __builtin_prefetch(line, 0, kLevel);
      if constexpr (kInto == Into::kBoth) __builtin_prefetch(line - kWindow + kFetchedNear, 0, 3);
    }
  }
};

inline bool is_on_amd() {
#if defined(__x86_64__)
  static const bool is_amd = __builtin_cpu_is("amd") != 0;
  return is_amd;
#else
  return false;
#endif
}

// Whether few rows are multiplied faster with weights that are fetched past the caches: a step takes 6 %
// less time so on AMD's Zen 5. On its Zen 4, of family 19h, eight rows take a seventh more, and on
// Intel's Sapphire Rapids twice as much.
inline bool fetches_past_caches() {
#if defined(__x86_64__)
  static const bool is_faster = [] {
    unsigned signature = 0, b = 0, c = 0, d = 0;
    __get_cpuid(1, &signature, &b, &c, &d);
    const unsigned family = (signature >> 8 & 0xf) + (signature >> 20 & 0xff);
    return is_on_amd() && family != 0x19;
  }();
  return is_faster;
#else
  return false;
#endif
}

}  // namespace blockdraft
