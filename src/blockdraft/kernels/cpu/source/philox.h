// Philox4x64-10 at random access (Salmon et al., 2011), with the words of numpy's generator.

#pragma once

#include <cstdint>

namespace blockdraft {

constexpr int kRounds = 10;
constexpr int kWords = 4;  // that a block has
constexpr int kTogether = 2;  // blocks side by side: one's products are waited for by the other's

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
  constexpr uint64_t kFirst = 0xD2E7470EE14C6C93u, kSecond = 0xCA5A826395121157u;
  uint64_t a[kNum], b[kNum], c[kNum], d[kNum];
  for (int i = 0; i < kNum; ++i) {
    a[i] = static_cast<uint64_t>(blocks[i]) + 1;
    b[i] = stream.position;
    c[i] = d[i] = 0;
  }
  uint64_t key = stream.seed, other_key = stream.sample_index;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kNum; ++i) {
      const uint64_t upper = high(kFirst, a[i]), lower = kFirst * a[i];
      const uint64_t other_upper = high(kSecond, c[i]), other_lower = kSecond * c[i];
      a[i] = other_upper ^ b[i] ^ key;
      b[i] = other_lower;
      c[i] = upper ^ d[i] ^ other_key;
      d[i] = lower;
    }
    key += 0x9E3779B97F4A7C15u;
    other_key += 0xBB67AE8584CAA73Bu;
  }
  for (int i = 0; i < kNum; ++i) {
    words[i][0] = a[i];
    words[i][1] = b[i];
    words[i][2] = c[i];
    words[i][3] = d[i];
  }
}

}  // namespace blockdraft
