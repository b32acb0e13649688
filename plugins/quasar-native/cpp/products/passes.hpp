// What all products do: pass over the rows of the input block by block, a few rows at a time.
#pragma once

#include "kernels.hpp"
#include "lanes/lanes.hpp"

namespace quasar {

// Weights far enough ahead to arrive in time from memory, into the second cache; a block is followed by the next one.
template <class T>
QUASAR_INLINE void fetch_ahead(const T* unit) {
  constexpr int64_t kAhead = 8192;
  __builtin_prefetch(reinterpret_cast<const char*>(unit) + kAhead, 0, 2);
}

template <class Isa>
QUASAR_INLINE void store_block(const PackedWeight& weight, int64_t row, int64_t block, typename Isa::Floats values,
                               float* outputs) {
  store_first<Isa>(outputs + row * weight.out + block * kLanes, values, weight.out - block * kLanes);
}

// Calls work.template run<rows>(first) until all rows are served, kMost at a time.
template <int kMost, class Work>
inline void in_passes(int64_t rows, const Work& work) {
  int64_t first = 0;
  for (; first + kMost <= rows; first += kMost) work.template run<kMost>(first);
  if constexpr (kMost > 1) {
    if (first < rows) work.template run_rest<kMost - 1>(first, rows - first);
  }
}

template <class Derived>
struct Passes {
  template <int kRows>
  inline void run_rest(int64_t first, int64_t rows) const {
    if (rows == kRows) return static_cast<const Derived*>(this)->template run<kRows>(first);
    if constexpr (kRows > 1) run_rest<kRows - 1>(first, rows);
  }
};

// A pass stays within a panel: the number of its rows divides kPanelRows.
template <int kMost, class BlockPasses, class Product>
void over_blocks(const Product& product, BlockRange range) {
  static_assert(kPanelRows % kMost == 0);
  for (int64_t block = range.begin; block < range.end; ++block) in_passes<kMost>(product.rows, BlockPasses(product, block));
}

}  // namespace quasar
