// What a decoder layer does to rows between its matrix products. Every function gives each row the
// value that it would have alone. Values are rounded to the tensor's type where transformers' own
// layers round them.

#pragma once

#include "lanes.h"

namespace blockdraft {

// The same numbers in float32.
template <typename T>
void widen_row(float* to, const T* from, int64_t num) {
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes) store(to + i, load(from + i));
  if (i < num) store_some(to + i, load_some(from + i, num - i), num - i);
}

template <typename T>
float inverse_rms(const T* row, int64_t size, float eps) {
  Lanes squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Lanes x = load(row + i);
    squares = multiply_add(x, x, squares);
  }
  if (i < size) {
    const Lanes x = load_some(row + i, size - i);
    squares = multiply_add(x, x, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
}

// `rounds_first`: round before the weight is applied too, not only after it.
template <typename T>
void norm_row(T* to, const T* row, const T* weight, int64_t size, float eps, bool rounds_first) {
  const float factor = inverse_rms(row, size, eps);
  const auto normed = [&](Lanes x, Lanes w) {
    const Lanes scaled = x * factor;
    return (rounds_first ? rounded<T>(scaled) : scaled) * w;
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, normed(load(row + i), load(weight + i)));
  if (i < size) {
    const int64_t rest = size - i;
    store_some(to + i, normed(load_some(row + i, rest), load_some(weight + i, rest)), rest);
  }
}

template <typename T>
void add_row(T* to, const T* a, const T* b, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, load(a + i) + load(b + i));
  if (i < size) {
    const int64_t rest = size - i;
    store_some(to + i, load_some(a + i, rest) + load_some(b + i, rest), rest);
  }
}

// Rows of values; the stride counts values.
template <typename T>
struct Strided {
  T* values;
  int64_t stride;

  T* row(int64_t index) const { return values + index * stride; }
};

// Of rows of `size`: their sum with a residual, if there is one, goes to `total`, and its norm to
// the output.
template <typename T>
struct Norm {
  const T* weight;
  int64_t size;
  float eps;
  bool rounds_first;

  void run(T* output, T* total, Strided<const T> input, Strided<const T> residual,
           int64_t row) const {
    const T* own = input.row(row);
    if (residual.values != nullptr) {
      add_row(total + row * size, own, residual.row(row), size);
      own = total + row * size;
    }
    norm_row(output + row * size, own, weight, size, eps, rounds_first);
  }
};

// What follows shares its rows among the threads of the region that calls it.

template <typename T>
void norm_rows(const Norm<T>& norm, T* output, T* total, Strided<const T> input,
               Strided<const T> residual, int64_t num_rows) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) norm.run(output, total, input, residual, row);
}

template <typename T>
void norm(void* output, void* total, const void* input, const void* residual, const void* weight,
          int64_t num_rows, int64_t size, float eps, bool rounds_first) {
  norm_rows(Norm<T>{static_cast<const T*>(weight), size, eps, rounds_first},
            static_cast<T*>(output), static_cast<T*>(total),
            Strided<const T>{static_cast<const T*>(input), size},
            Strided<const T>{static_cast<const T*>(residual), size}, num_rows);
}

template <typename T>
Lanes turned(Lanes own, Lanes other, Lanes cosine, Lanes sine) {
  return rounded<T>(own * cosine) + rounded<T>(other * sine);
}

// Turns the two halves of a head by the same angles; the sign of the first half is in `sine`.
template <typename T>
void rotate_head(T* first, const T* cosine, const T* sine, int64_t half) {
  T* second = first + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Lanes x = load(first + i), y = load(second + i);
    store(first + i, turned<T>(x, y, load(cosine + i), load(sine + i)));
    store(second + i, turned<T>(y, x, load(cosine + half + i), load(sine + half + i)));
  }
  if (i == half) return;
  const int64_t rest = half - i;
  const auto some = [&](const T* from) { return load_some(from + i, rest); };
  const Lanes x = some(first), y = some(second);
  store_some(first + i, turned<T>(x, y, some(cosine), some(sine)), rest);
  store_some(second + i, turned<T>(y, x, some(cosine + half), some(sine + half)), rest);
}

// Heads side by side in rows: of queries, and of keys behind them.
template <typename T>
struct Rotation {
  T* heads;
  int64_t row_stride;
  const T* cosine;
  const T* sine;
  const T* query_weight;  // of norms, or null
  const T* key_weight;
  int64_t num_queries;
  int64_t head_dim;
  float eps;
  bool rounds_first;

  T* head(int64_t row, int64_t index) const { return heads + row * row_stride + index * head_dim; }

  // Norms and turns a head.
  void run(int64_t row, int64_t index) const {
    const T* weight = index < num_queries ? query_weight : key_weight;
    if (weight != nullptr)
      norm_row(head(row, index), head(row, index), weight, head_dim, eps, rounds_first);
    rotate_head(head(row, index), cosine + row * head_dim, sine + row * head_dim, head_dim / 2);
  }
};

inline Lanes silu(Lanes x) { return x / (1.0f + exponential(-x)); }

// Values of a gate, from a piece of a row of gates and the same of the values behind them.
template <typename T>
void gate_piece(T* to, const T* gates, const T* values, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    store(to + i, rounded<T>(silu(load(gates + i))) * load(values + i));
  if (i < size) {
    const int64_t rest = size - i;
    const Lanes opened = rounded<T>(silu(load_some(gates + i, rest)));
    store_some(to + i, opened * load_some(values + i, rest), rest);
  }
}

template <typename T>
void gate(void* output, const void* input, int64_t num_rows, int64_t size) {
  constexpr int64_t kPiece = 256;  // one row is work for several threads
#pragma omp for collapse(2) schedule(static)
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t first = 0; first < size; first += kPiece) {
      const T* gates = static_cast<const T*>(input) + row * 2 * size + first;
      gate_piece(static_cast<T*>(output) + row * size + first, gates, gates + size,
                 size - first < kPiece ? size - first : kPiece);
    }
  }
}

template <typename T>
void add(Strided<T> output, const T* a, const T* b, int64_t num_rows, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < num_rows; ++row)
    add_row(output.row(row), a + row * size, b + row * size, size);
}

}  // namespace blockdraft
