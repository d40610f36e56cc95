// Where keys and values lie: as they are, or in whole numbers of 8 bits.
//
// A row is what a token has in one head. It is rounded by its own values alone, so it does not matter
// what is written beside it. Rows are found by the place of their first value in the pool.

#pragma once

#include <limits>
#include <vector>

#include "tiles.h"

namespace blockdraft {

constexpr int64_t kMaxHeadDim = 512;

// Keys and values of a layer. Scales, of int8 alone: one of each row, in the order of the rows; else
// null.
struct Pools {
  void* keys;
  void* values;
  float* key_scales;
  float* value_scales;
};

template <typename T>
void fetch_ahead(const T* values, int64_t num) {
  const char* bytes = reinterpret_cast<const char*>(values);
  const int64_t num_bytes = num * static_cast<int64_t>(sizeof(T));
  for (int64_t line = 0; line < num_bytes; line += kCacheLine) __builtin_prefetch(bytes + line);
}

// Keys or values of type T.
template <typename T>
struct Plain {
  T* rows;

  void write(int64_t at, const T* row, int64_t size) const { copy(rows + at, row, size); }
  void read(T* row, int64_t at, int64_t size) const { copy(row, rows + at, size); }

  // The rows of a tile, `seen` of which are wanted; the others may be anything.
  const T* tile(std::vector<T>&, int64_t at, Range, int64_t) const { return rows + at; }

  // Lets the memory bring the rows of a tile meanwhile.
  void fetch(int64_t at, int64_t size) const { fetch_ahead(rows + at, kTile * size); }

 private:
  static void copy(T* to, const T* from, int64_t size) {
    std::memcpy(to, from, static_cast<size_t>(size) * sizeof(T));
  }
};

// Returns the scale: NaN if a value is none, infinite if one is infinite; the numbers are then zeros.
template <typename T>
float round_row(int8_t* to, const T* row, int64_t size) {
  constexpr float kLargest = 127.0f, kTiny = std::numeric_limits<float>::min();
  const float shift = 12582912.0f;  // 1.5 * 2^23: a sum with it has no bits behind the point
  Lanes sizes{};
  for (int64_t d = 0; d < size; d += kLanes) {
    const Lanes x = load(row + d);
    sizes = select(x == x, largest(largest(x, -x), sizes), x);  // what is NaN stays it
  }
  float held[kLanes], top = 0.0f;
  store(held, sizes);
  for (float own : held)
    if (own > top || own != own) top = own;
  const float scale = top / kLargest, divisor = scale < kTiny ? kTiny : scale;
  for (int64_t d = 0; d < size; d += kLanes) {
    const Lanes x = load(row + d) / divisor;
    store(held, (select(x == x, x, Lanes{}) + shift) - shift);
    for (int i = 0; i < kLanes; ++i) to[d + i] = static_cast<int8_t>(held[i]);
  }
  return scale;
}

// Keys or values of a model of type T, rounded.
template <typename T>
struct Rounded {
  int8_t* numbers;
  float* scales;

  void write(int64_t at, const T* row, int64_t size) const {
    scales[at / size] = round_row(numbers + at, row, size);
  }

  void read(T* row, int64_t at, int64_t size) const {
    const float scale = scales[at / size];
    for (int64_t d = 0; d < size; d += kLanes) store(row + d, load(numbers + at + d) * scale);
  }

  void fetch(int64_t at, int64_t size) const { fetch_ahead(numbers + at, kTile * size); }

  const T* tile(std::vector<T>& buffer, int64_t at, Range seen, int64_t size) const {
    if (buffer.empty()) buffer.resize(kMaxHeadDim * kTile);
    for (int64_t place = seen.first; place < seen.end; ++place)
      read(buffer.data() + place * size, at + place * size, size);
    return buffer.data();
  }
};

// Calls act(keys, values) with pools of a model of type T.
template <typename T, typename Act>
void with_pools(const Pools& pools, const Act& act) {
  if (pools.key_scales == nullptr)
    act(Plain<T>{static_cast<T*>(pools.keys)}, Plain<T>{static_cast<T*>(pools.values)});
  else
    act(Rounded<T>{static_cast<int8_t*>(pools.keys), pools.key_scales},
        Rounded<T>{static_cast<int8_t*>(pools.values), pools.value_scales});
}

}  // namespace blockdraft
