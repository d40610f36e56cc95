// Sixteen float32 lanes, whatever the width of the machine's registers.
//
// Every sum in these kernels is written as operations on lanes in a fixed order, so its bits follow
// from the source and not from how a compiler happens to unroll a loop. Multiply-and-add is
// explicit for the same reason: the build turns contraction off.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

// Whether this build has registers of eight lanes.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define BLOCKDRAFT_TWO_REGISTERS 1
#include "two_registers.h"
#else
#define BLOCKDRAFT_TWO_REGISTERS 0
#endif

// Whether this build multiplies pairs of int16 values, and adds both products in int32.
#if BLOCKDRAFT_TWO_REGISTERS || (defined(__AVX512F__) && defined(__AVX512BW__))
#define BLOCKDRAFT_HAS_NUMBERS 1
#else
#define BLOCKDRAFT_HAS_NUMBERS 0
#endif

namespace blockdraft {

constexpr int64_t kCacheLine = 64;  // bytes
constexpr int kLanes = 16;

#if BLOCKDRAFT_TWO_REGISTERS
typedef TwoRegisters<float> Lanes;
typedef TwoRegisters<int32_t> Ints;
typedef TwoRegisters<uint32_t> Bits;
#else
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
#endif
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef int16_t Shorts __attribute__((vector_size(32)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

inline float value_of(float x) { return x; }

inline float value_of(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline Lanes all(float x) { return x - Lanes{}; }

#if BLOCKDRAFT_TWO_REGISTERS
template <typename T>
TwoRegisters<T> select(Ints condition, TwoRegisters<T> yes, TwoRegisters<T> no) {
  return {condition.low ? yes.low : no.low, condition.high ? yes.high : no.high};
}

inline Lanes load(const float* from) {
  return {(Lanes::Register)_mm256_loadu_ps(from), (Lanes::Register)_mm256_loadu_ps(from + 8)};
}

inline void store(float* to, Lanes x) {
  _mm256_storeu_ps(to, (__m256)x.low);
  _mm256_storeu_ps(to + 8, (__m256)x.high);
}

inline Bits widened(Halves halves) {
  const __m256i all_halves = (__m256i)halves;
  return {(Bits::Register)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all_halves)),
          (Bits::Register)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all_halves, 1))};
}

inline Lanes load(const int8_t* from) {
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {(Lanes::Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)),
          (Lanes::Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8)))};
}

// The lower halves.
inline Halves narrowed(Bits bits) {
  const __m256i packed =
      _mm256_packus_epi32((__m256i)(bits.low & 0xffffu), (__m256i)(bits.high & 0xffffu));
  return (Halves)_mm256_permute4x64_epi64(packed, 0xd8);
}
#else
template <typename T>
T select(Ints condition, T yes, T no) {
  return condition ? yes : no;
}

inline Lanes load(const float* from) {
  Lanes x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }

// Compilers take both apart and put them together again.
#ifdef __AVX512F__
inline Bits widened(Halves halves) { return (Bits)_mm512_cvtepu16_epi32((__m256i)halves); }

// The lower halves.
inline Halves narrowed(Bits bits) { return (Halves)_mm512_cvtepi32_epi16((__m512i)bits); }
#else
inline Bits widened(Halves halves) { return __builtin_convertvector(halves, Bits); }

inline Halves narrowed(Bits bits) { return __builtin_convertvector(bits, Halves); }
#endif

inline Lanes load(const int8_t* from) {
  Bytes numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  // Step by step: compilers take a larger one value by value.
  const Shorts wider = __builtin_convertvector(numbers, Shorts);
  return __builtin_convertvector(__builtin_convertvector(wider, Ints), Lanes);
}
#endif

inline Lanes load(const BFloat16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return (Lanes)(widened(halves) << 16);
}

// Rounds to the nearest, ties to even, as torch does.
inline void store(BFloat16* to, Lanes x) {
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits quiet_nan = Bits{} + 0x7fc0u;
  const Halves halves = narrowed(select(x == x, rounded, quiet_nan));
  std::memcpy(to, &halves, sizeof halves);
}

// What is left of `x` after a tensor of type T has held it.
template <typename T>
inline Lanes rounded(Lanes x) {
  T held[kLanes];
  store(held, x);
  return load(held);
}

template <>
inline Lanes rounded<float>(Lanes x) {
  return x;
}

// The first `num` values, zeros behind them.
template <typename T>
inline Lanes load_some(const T* from, int64_t num) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, static_cast<size_t>(num) * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_some(T* to, Lanes x, int64_t num) {
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, static_cast<size_t>(num) * sizeof(T));
}

// A number of lanes that the compiler knows to be all of them.
typedef std::integral_constant<int64_t, kLanes> AllLanes;

template <typename T>
inline Lanes load_some(const T* from, AllLanes) {
  return load(from);
}

template <typename T>
inline void store_some(T* to, Lanes x, AllLanes) {
  store(to, x);
}

// Calls act(i, num) for the values from `begin` to `end`: for all lanes at a time, then for the rest.
template <typename Act>
inline void in_lanes(int64_t begin, int64_t end, const Act& act) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) act(i, AllLanes{});
  if (i < end) act(i, end - i);
}

// a * b + c, rounded once where the machine can.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#ifdef __AVX512F__
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif BLOCKDRAFT_TWO_REGISTERS
  return {(Lanes::Register)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (Lanes::Register)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#else
  return a * b + c;
#endif
}

// Whether this build multiplies pairs of bfloat16 values, and adds both products in float32.
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define BLOCKDRAFT_HAS_PAIRS 1
#else
#define BLOCKDRAFT_HAS_PAIRS 0
#endif

// Whether this build can take pairs of bfloat16 weights apart instead, and multiply in float32.
#if defined(__AVX512F__) && defined(__AVX512BW__)
#define BLOCKDRAFT_SPLITS_PAIRS 1
#else
#define BLOCKDRAFT_SPLITS_PAIRS 0
#endif

// The values of a T that lie side by side in a lane for one multiplication. Inline, as GCC from 16 on
// gives what is specialized to each object file, and the linker refuses the second.
template <typename T>
inline constexpr int64_t kStep = 1;
template <>
inline constexpr int64_t kStep<BFloat16> = BLOCKDRAFT_HAS_PAIRS ? 2 : 1;
template <>
inline constexpr int64_t kStep<int16_t> = 2;

// Whether pairs of bfloat16 are taken apart: where nothing multiplies pairs, and on Intel's
// processors, which multiply twice as many values a cycle in float32 (docs/experiments/intel.md).
inline bool splits_pairs() {
#if BLOCKDRAFT_SPLITS_PAIRS
  static const bool is_faster = !BLOCKDRAFT_HAS_PAIRS || __builtin_cpu_is("intel") != 0;
  return is_faster;
#else
  return false;
#endif
}

#if BLOCKDRAFT_SPLITS_PAIRS
// The first or the second values of sixteen pairs.
template <int kIndex>
Lanes load_of_pairs(const void* from) {
  if constexpr (kIndex == 0) return (Lanes)_mm512_slli_epi32(_mm512_loadu_si512(from), 16);
  // Without the lower halves: a mask in a register of lanes would be one too many.
  return (Lanes)_mm512_maskz_loadu_epi16(0xaaaaaaaa, from);
}
#endif

// A word is what a lane holds for one multiplication: kStep<T> values, one of them as float32.
// Words are copied as they are; not every one is a number. Sums of int16 are int32 in the same lanes.

// The 32 bits in every lane.
inline Lanes spread(const void* from) {
  int32_t word;
  std::memcpy(&word, from, sizeof word);
  return (Lanes)(word - Ints{});
}

// The first word of the values in every lane.
template <typename T>
Lanes spread_word(const T* from) {
  if constexpr (kStep<T> == 2 || sizeof(T) == sizeof(float)) {
    return spread(from);
  } else {
    const uint32_t bits = static_cast<uint32_t>(from->bits) << 16;
    return spread(&bits);
  }
}

// The first `num` words of the values, zeros behind them.
template <typename T>
Lanes load_words(const T* from, int64_t num = kLanes) {
  if constexpr (kStep<T> == 2) {
    Lanes words{};
    std::memcpy(&words, from, static_cast<size_t>(num) * sizeof(float));
    return words;
  } else {
    return num == kLanes ? load(from) : load_some(from, num);
  }
}

#if BLOCKDRAFT_TWO_REGISTERS
inline Lanes::Register add_pairs(Lanes::Register a, Lanes::Register b, Lanes::Register c) {
  // Left alone, compilers make all products of a step first, and have no registers for the sums.
  asm volatile("vpaddd %1, %0, %0" : "+x"(c) : "x"(_mm256_madd_epi16((__m256i)a, (__m256i)b)));
  return c;
}

// The int32 values in the lanes.
inline Lanes numbers(Lanes words) {
  return {(Lanes::Register)_mm256_cvtepi32_ps((__m256i)words.low),
          (Lanes::Register)_mm256_cvtepi32_ps((__m256i)words.high)};
}

// The nearest whole numbers, of two equally near ones the even one; they must fit.
inline void store_rounded(int16_t* to, Lanes x) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)x.low),
                                            _mm256_cvtps_epi32((__m256)x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}
#elif BLOCKDRAFT_HAS_NUMBERS
inline Lanes add_pairs(Lanes a, Lanes b, Lanes c) {
#ifdef __AVX512VNNI__
  return (Lanes)_mm512_dpwssd_epi32((__m512i)c, (__m512i)a, (__m512i)b);
#else
  return (Lanes)_mm512_add_epi32((__m512i)c, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#endif
}

inline Lanes numbers(Lanes words) { return (Lanes)_mm512_cvtepi32_ps((__m512i)words); }

inline void store_rounded(int16_t* to, Lanes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)x)));
}
#endif

// a * b + c with words of T in a and b.
template <typename T>
Lanes multiply_step(Lanes a, Lanes b, Lanes c) {
#if BLOCKDRAFT_TWO_REGISTERS
  if constexpr (std::is_same_v<T, int16_t>)
    return {add_pairs(a.low, b.low, c.low), add_pairs(a.high, b.high, c.high)};
#elif BLOCKDRAFT_HAS_NUMBERS
  if constexpr (std::is_same_v<T, int16_t>) return add_pairs(a, b, c);
#endif
#if BLOCKDRAFT_HAS_PAIRS
  if constexpr (std::is_same_v<T, BFloat16>)
    return (Lanes)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
  return multiply_add(a, b, c);
}

// multiply_step whose result takes the register of c. Where sums just fit the registers, the compiler
// alone would move them about until some have to wait in memory.
template <typename T>
inline Lanes add_step(Lanes a, Lanes b, Lanes c) {
#ifdef __AVX512F__
  if constexpr (std::is_same_v<T, float>) {
    __m512 sum = (__m512)c;
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"((__m512)a), "v"((__m512)b));
    return (Lanes)sum;
  }
#endif
  return multiply_step<T>(a, b, c);
}

// Calls act(N) with `num`, from 1 to N, as a constant of the compiler.
template <int N, typename Act>
void with_constant(int64_t num, const Act& act) {
  if (num == N)
    act(std::integral_constant<int, N>{});
  else if constexpr (N > 1)
    with_constant<N - 1>(num, act);
}

inline Lanes largest(Lanes a, Lanes b) { return select(a > b, a, b); }

// Lanes 0 and 8, 1 and 9, ... first, and so on: always the same tree.
inline float sum(Lanes x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float largest(Lanes x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
#endif
}

// e to the power of x: 2^n e^r with |r| <= ln(2) / 2, and e^r by its Taylor series up to r^7.
// Results below the normal numbers are 0. What is no number stays none.
inline Lanes exponential(Lanes x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits behind the point
  const Lanes n = (x * 1.44269504f + shift) - shift;
  Lanes r = multiply_add(n, all(-0.693359375f), x);
  r = multiply_add(n, all(2.12194440e-4f), r);
  Lanes series = all(1.0f / 5040);
  for (float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    series = multiply_add(series, r, all(term));
#ifdef __AVX512F__
  const Lanes result = (Lanes)_mm512_scalef_ps((__m512)series, (__m512)n);
#else
  // Two factors: 2^n alone does not fit where the result just does.
  const Ints half = (Ints)(Bits)(n * 0.5f + shift) - 0x4b400000;
  const Ints rest = (Ints)(Bits)(n + shift) - 0x4b400000 - half;
  const Lanes result = series * (Lanes)((half + 127) << 23) * (Lanes)((rest + 127) << 23);
#endif
  const Lanes capped = select(x > 88.73f, all(INFINITY), result);
  return select(x < -87.33f, Lanes{}, capped);
}

}  // namespace blockdraft
