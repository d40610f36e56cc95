// Philox4x64-10 at random access (Salmon et al., 2011), with the words of numpy's generator.

#pragma once

#include <cmath>
#include <cstdint>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace blockdraft {

constexpr int kRounds = 10;
constexpr int kWords = 4;  // that a block has
constexpr int kTogether = 2;  // blocks side by side: one's products are waited for by the other's
constexpr uint64_t kFactor = 0xD2E7470EE14C6C93u, kOtherFactor = 0xCA5A826395121157u;
constexpr uint64_t kKeyStep = 0x9E3779B97F4A7C15u, kOtherKeyStep = 0xBB67AE8584CAA73Bu;

// The place of a block: key and counter without the first word.
struct Stream {
  uint64_t seed;
  uint64_t sample_index;
  uint64_t position;
};

inline uint64_t high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

// The words of `kNum` blocks; numpy's generator counts before it draws.
template <int kNum>
inline void draw(uint64_t (*words)[kWords], const Stream& stream, const int64_t* blocks) {
  uint64_t a[kNum], b[kNum], c[kNum], d[kNum];
  for (int i = 0; i < kNum; ++i) {
    a[i] = static_cast<uint64_t>(blocks[i]) + 1;
    b[i] = stream.position;
    c[i] = d[i] = 0;
  }
  uint64_t key = stream.seed, other_key = stream.sample_index;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kNum; ++i) {
      const uint64_t upper = high(kFactor, a[i]), lower = kFactor * a[i];
      const uint64_t other_upper = high(kOtherFactor, c[i]), other_lower = kOtherFactor * c[i];
      a[i] = other_upper ^ b[i] ^ key;
      b[i] = other_lower;
      c[i] = upper ^ d[i] ^ other_key;
      d[i] = lower;
    }
    key += kKeyStep;
    other_key += kOtherKeyStep;
  }
  for (int i = 0; i < kNum; ++i) {
    words[i][0] = a[i];
    words[i][1] = b[i];
    words[i][2] = c[i];
    words[i][3] = d[i];
  }
}

// The noise that a word gives; `speculate/sampler/noise.py` says why. Its logarithms may round
// otherwise than numpy's.
inline double gumbel_noise(uint64_t word) {
  const double uniform = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52;
  return -std::log(-std::log1p(-uniform));
}

#ifdef __AVX512F__
constexpr int64_t kBlocksOfLanes = 8;

// Both halves, 64 bits each, of a product with a constant.
struct Halved {
  __m512i upper, lower;
};

inline Halved halved_product(__m512i x, uint64_t constant) {
  const __m512i low_words = _mm512_set1_epi64(0xffffffff);
  const __m512i low = _mm512_set1_epi64(static_cast<int64_t>(constant & 0xffffffffu));
  const __m512i high = _mm512_set1_epi64(static_cast<int64_t>(constant >> 32));
  const __m512i x_high = _mm512_srli_epi64(x, 32), least = _mm512_mul_epu32(x, low);
  const __m512i cross =
      _mm512_add_epi64(_mm512_mul_epu32(x_high, low), _mm512_srli_epi64(least, 32));
  const __m512i other =
      _mm512_add_epi64(_mm512_mul_epu32(x, high), _mm512_and_si512(cross, low_words));
  const __m512i carried =
      _mm512_add_epi64(_mm512_srli_epi64(cross, 32), _mm512_srli_epi64(other, 32));
  return {_mm512_add_epi64(_mm512_mul_epu32(x_high, high), carried),
          _mm512_mask_blend_epi32(0xaaaa, least, _mm512_slli_epi64(other, 32))};
}

// The words of eight blocks, one block behind another, a lane each.
inline void draw_lanes(__m512i (&words)[kWords], const Stream& stream, int64_t block) {
  const __m512i places = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  constexpr int kXor = 0x96;  // of three
  words[0] = _mm512_add_epi64(_mm512_set1_epi64(block), places);
  words[1] = _mm512_set1_epi64(static_cast<int64_t>(stream.position));
  words[2] = words[3] = _mm512_setzero_si512();
  uint64_t key = stream.seed, other_key = stream.sample_index;
  for (int round = 0; round < kRounds; ++round) {
    const Halved first = halved_product(words[0], kFactor);
    const Halved second = halved_product(words[2], kOtherFactor);
    words[0] = _mm512_ternarylogic_epi64(second.upper, words[1],
                                         _mm512_set1_epi64(static_cast<int64_t>(key)), kXor);
    words[1] = second.lower;
    words[2] = _mm512_ternarylogic_epi64(first.upper, words[3],
                                         _mm512_set1_epi64(static_cast<int64_t>(other_key)), kXor);
    words[3] = first.lower;
    key += kKeyStep;
    other_key += kOtherKeyStep;
  }
}
#endif

}  // namespace blockdraft
