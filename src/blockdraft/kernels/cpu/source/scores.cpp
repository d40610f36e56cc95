// Scores of the tokens of a vocabulary, from which a drafter guesses and the target's token is chosen.

#include "largest.h"
#include "rows.h"

extern "C" {

// Of scores [num_rows, num]: values and places [num_rows, num_kept], totals [num_rows].
void blockdraft_largest(int is_bfloat16, float* values, int64_t* places, float* totals,
                        const void* scores, int64_t num_rows, int64_t num, int64_t num_kept) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      blockdraft::largest_of_row(static_cast<const T*>(scores) + row * num, num, num_kept,
                                 values + row * num_kept, places + row * num_kept, totals + row);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// places: [num_rows], of the first largest of scores [num_rows, num].
void blockdraft_first_largest(int is_bfloat16, int64_t* places, const void* scores,
                              int64_t num_rows, int64_t num) {
  const auto run = [&](auto value) {
    using T = decltype(value);
    for (int64_t row = 0; row < num_rows; ++row)
      places[row] = blockdraft::first_largest(static_cast<const T*>(scores) + row * num, num);
  };
  if (is_bfloat16)
    run(blockdraft::BFloat16{});
  else
    run(0.0f);
}

// The same numbers, [num] each.
void blockdraft_widen(float* to, const void* from, int64_t num) {
  blockdraft::widen_row(to, static_cast<const blockdraft::BFloat16*>(from), num);
}

}  // extern "C"
