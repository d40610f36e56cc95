// What attention may be asked for, checked before any of it is read or written.
//
// Sizes, types and strides are checked where the tensors are known, in Python. Numbers that lie in
// tensors are checked here, in every call: they are few beside the keys that they point to.

#pragma once

#include "attention.h"

namespace blockdraft {

// Why a call is refused; library.py has the words.
enum Refusal : int {
  kNone = 0,
  kHeadSize = 1,
  kSpans = 2,
  kSlots = 3,
  kRanges = 4,
  kPages = 5,
  kCounts = 6,
  kPaths = 7,
  kMemory = 8,
};

// The keys of a path up to `end` lie in the buffer.
inline Refusal refusal_of_path(const Plan& plan, const Layer& layer, const int64_t* path,
                               int64_t end) {
  const int64_t num = end - path[0];
  if (path[0] < 0 || path[1] < 0 || num > plan.num_path_slots - path[1]) return kPaths;
  for (int64_t i = 0; i < num; ++i) {
    const int64_t slot = plan.path_slots[path[1] + i];
    if (slot < 0 || slot >= layer.num_slots) return kPaths;
  }
  return kNone;
}

// The rows of a span see keys of the buffer, through pages of the buffer where there is a table.
inline Refusal refusal_of_span(const Plan& plan, const Layer& layer, int64_t index) {
  const int64_t* span = plan.spans + 3 * index;
  const int64_t first_row = span[0], num_rows = span[1], place = span[2];
  int64_t end = plan.ranges == nullptr ? plan.num_keys : 0;
  for (int64_t row = first_row; plan.ranges != nullptr && row < first_row + num_rows; ++row) {
    const int64_t* range = plan.ranges + 2 * row;
    if (range[0] < 0 || range[1] < range[0]) return kRanges;
    end = range[1] > end ? range[1] : end;
  }
  if (plan.paths != nullptr) {
    const Refusal refusal = refusal_of_path(plan, layer, plan.paths + 2 * index, end);
    if (refusal != kNone) return refusal;
  }
  if (plan.pages == nullptr) return end < 0 || end > layer.num_slots ? kRanges : kNone;
  if (place < 0 || place > plan.num_pages) return kPages;
  if (end < 0 || end > (plan.num_pages - place) * kTile) return kRanges;
  for (int64_t tile = 0; tile * kTile < end; ++tile) {
    const int64_t page = plan.pages[place + tile];
    if (page < 0 || page >= layer.num_slots / kTile) return kPages;
  }
  return kNone;
}

inline Refusal refusal_of(const Plan& plan, const Layer& layer) {
  const int64_t head_dim = layer.head_dim;
  if (head_dim <= 0 || head_dim % kLanes != 0 || head_dim > kMaxHeadDim) return kHeadSize;
  if (layer.kv_heads < 1 || layer.group < 1 || plan.num_threads < 1) return kCounts;
  int64_t num_covered = 0;
  for (int64_t index = 0; index < plan.num_spans; ++index) {
    const int64_t* span = plan.spans + 3 * index;
    if (span[0] != num_covered || span[1] < 0 || span[1] > plan.num_rows - num_covered)
      return kSpans;
    num_covered += span[1];
    if (num_covered > plan.num_ranges && plan.ranges != nullptr) return kRanges;
    const Refusal refusal = refusal_of_span(plan, layer, index);
    if (refusal != kNone) return refusal;
  }
  for (int64_t row = 0; plan.slots != nullptr && row < plan.num_rows; ++row)
    if (plan.slots[row] < 0 || plan.slots[row] >= layer.num_slots) return kSlots;
  return kNone;
}

}  // namespace blockdraft
