// Random words; see philox.h.

#include "philox.h"

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
  constexpr int64_t kDrawn = kTogether * kWords;
  const int64_t part = (num / num_threads / kDrawn + 1) * kDrawn;
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
  for (int64_t t = 0; t < num_threads; ++t) {
    const int64_t end = (t + 1) * part < num ? (t + 1) * part : num;
    int64_t count = 0;
    uint64_t drawn[kTogether][kWords];
    int64_t blocks[kTogether];
    for (int64_t first = t * part; first < end; first += kDrawn) {
      for (int64_t j = 0; j < kTogether; ++j) blocks[j] = first / kWords + j;
      draw<kTogether>(drawn, *static_cast<const Stream*>(stream), blocks);
      const uint64_t* word = &drawn[0][0];
      for (int64_t j = 0; j < kDrawn && first + j < end; ++j) {
        if (word[j] >= limit) continue;
        if (count < capacity) {
          ids[t * capacity + count] = first + j;
          words[t * capacity + count] = word[j];
        }
        ++count;
      }
    }
    num_found[t] = count;
  }
}

}  // extern "C"
