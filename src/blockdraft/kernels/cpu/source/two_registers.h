// Sixteen values in two registers of eight, with the operators of a vector.
//
// Compilers keep vectors that are wider than the machine's registers in memory, also between the
// steps of a sum.

#pragma once

namespace blockdraft {

template <typename T>
struct TwoRegisters {
  typedef T Register __attribute__((vector_size(32)));
  Register low, high;

  T operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }

  // The same bits.
  template <typename U>
  explicit operator TwoRegisters<U>() const {
    return {(typename TwoRegisters<U>::Register)low, (typename TwoRegisters<U>::Register)high};
  }

  TwoRegisters operator-() const { return {-low, -high}; }
};

// Not deduced, so that constants of other types are converted.
template <typename T>
using OneOf = decltype(TwoRegisters<T>{}[0]);

#define BLOCKDRAFT_OPERATOR(op)                                          \
  template <typename T>                                                  \
  TwoRegisters<T> operator op(TwoRegisters<T> a, TwoRegisters<T> b) {    \
    return {a.low op b.low, a.high op b.high};                           \
  }                                                                      \
  template <typename T>                                                  \
  TwoRegisters<T> operator op(TwoRegisters<T> a, OneOf<T> b) {           \
    return {a.low op b, a.high op b};                                    \
  }                                                                      \
  template <typename T>                                                  \
  TwoRegisters<T> operator op(OneOf<T> a, TwoRegisters<T> b) {           \
    return {a op b.low, a op b.high};                                    \
  }

BLOCKDRAFT_OPERATOR(+)
BLOCKDRAFT_OPERATOR(-)
BLOCKDRAFT_OPERATOR(*)
BLOCKDRAFT_OPERATOR(/)
BLOCKDRAFT_OPERATOR(&)
BLOCKDRAFT_OPERATOR(<<)
BLOCKDRAFT_OPERATOR(>>)
#undef BLOCKDRAFT_OPERATOR

// All bits of a lane where it holds.
#define BLOCKDRAFT_COMPARISON(op)                                                \
  inline TwoRegisters<int32_t> operator op(TwoRegisters<float> a, TwoRegisters<float> b) { \
    return {a.low op b.low, a.high op b.high};                                   \
  }                                                                              \
  inline TwoRegisters<int32_t> operator op(TwoRegisters<float> a, float b) {               \
    return {a.low op b, a.high op b};                                            \
  }

BLOCKDRAFT_COMPARISON(<)
BLOCKDRAFT_COMPARISON(>)
BLOCKDRAFT_COMPARISON(==)
#undef BLOCKDRAFT_COMPARISON

}  // namespace blockdraft
