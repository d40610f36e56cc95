// Random words; see philox.h.

#include <algorithm>

#include "philox.h"

namespace blockdraft {
namespace {

// Fewer words than this are drawn before other threads would have woken up.
constexpr int64_t kMinParallelWords = 1 << 17;

// What is found of a stream's words.
struct Found {
  int64_t* ids;
  uint64_t* words;
  int64_t capacity;
  int64_t num;

  // Those below the limit of words that follow each other, the first of them of the token `first`.
  void take(const uint64_t* drawn, int64_t num_drawn, int64_t first, uint64_t limit) {
    for (int64_t i = 0; i < num_drawn; ++i) {
      if (drawn[i] >= limit) continue;
      if (num < capacity) {
        ids[num] = first + i;
        words[num] = drawn[i];
      }
      ++num;
    }
  }
};

#ifdef __AVX512F__
constexpr int64_t kDrawn = kBlocksOfLanes * kWords;

void take_below(Found& found, const Stream& stream, int64_t first, int64_t num, uint64_t limit) {
  __m512i words[kWords];
  draw_lanes(words, stream, first / kWords);
  const __m512i limits = _mm512_set1_epi64(static_cast<int64_t>(limit));
  bool is_any = false;
  for (const __m512i& own : words) is_any = is_any || _mm512_cmplt_epu64_mask(own, limits) != 0;
  if (!is_any) return;
  uint64_t lanes[kWords][kBlocksOfLanes], drawn[kDrawn];
  for (int word = 0; word < kWords; ++word) _mm512_storeu_si512(lanes[word], words[word]);
  for (int64_t i = 0; i < kDrawn; ++i) drawn[i] = lanes[i % kWords][i / kWords];
  found.take(drawn, num, first, limit);
}
#else
constexpr int64_t kDrawn = kTogether * kWords;

void take_below(Found& found, const Stream& stream, int64_t first, int64_t num, uint64_t limit) {
  uint64_t drawn[kTogether][kWords];
  int64_t blocks[kTogether];
  for (int64_t j = 0; j < kTogether; ++j) blocks[j] = first / kWords + j;
  draw<kTogether>(drawn, stream, blocks);
  found.take(drawn[0], num, first, limit);
}
#endif

}  // namespace
}  // namespace blockdraft

extern "C" {

// The words of single tokens: the first counts[0] ids belong to the first stream, and so on.
void blockdraft_words_at(uint64_t* words, const void* streams, const int64_t* counts,
                         int64_t num_streams, const int64_t* ids) {
  using namespace blockdraft;
  const Stream* stream = static_cast<const Stream*>(streams);
  for (int64_t s = 0; s < num_streams; ++s) {
    int64_t i = 0;
    uint64_t drawn[kTogether][kWords];
    int64_t blocks[kTogether];
    for (; i < counts[s]; i += kTogether) {
      const int64_t num = counts[s] - i < kTogether ? counts[s] - i : kTogether;
      for (int64_t j = 0; j < kTogether; ++j) blocks[j] = ids[i + (j < num ? j : 0)] / kWords;
      draw<kTogether>(drawn, stream[s], blocks);
      for (int64_t j = 0; j < num; ++j) words[i + j] = drawn[j][ids[i + j] % kWords];
    }
    words += counts[s];
    ids += counts[s];
  }
}

// Which of the first `num` words of a stream are below `limit`, ascending, and the words. Each of
// `num_threads` looks at a part, and writes `capacity` of what it finds behind the part before;
// `num_found` says how many there are in each.
void blockdraft_words_below(int64_t* ids, uint64_t* words, int64_t* num_found, int64_t capacity,
                            const void* stream, int64_t num, uint64_t limit, int64_t num_threads) {
  using namespace blockdraft;
  const Stream& own = *static_cast<const Stream*>(stream);
  const int64_t part = (num / num_threads / kDrawn + 1) * kDrawn;
#pragma omp parallel for num_threads(num_threads) if (num >= kMinParallelWords) schedule(static)
  for (int64_t t = 0; t < num_threads; ++t) {
    const int64_t end = std::min((t + 1) * part, num);
    Found found{ids + t * capacity, words + t * capacity, capacity, 0};
    for (int64_t first = t * part; first < end; first += kDrawn)
      take_below(found, own, first, std::min(kDrawn, end - first), limit);
    num_found[t] = found.num;
  }
}

}  // extern "C"
