// Keys and values of one sequence, in blocks of positions that are allocated as the sequence grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.hpp"
#include "row_kernels.hpp"

namespace quasar {

class Cache {
 public:
  Cache(CacheType type, int64_t layers, int64_t heads, int64_t head_dim);

  // Room for positions 0..length-1. Throws std::bad_alloc and then keeps what there is.
  void reserve(int64_t length);

  const HeadLayout& layout() const { return layout_; }
  const std::byte* const* blocks() const { return pointers_.data(); }
  int64_t head_offset(int64_t layer, int64_t head) const { return (layer * heads_ + head) * layout_.bytes; }
  std::byte* head(int64_t position, int64_t layer, int64_t head) {
    return blocks_[position / kBlockPositions].data() + head_offset(layer, head);
  }

 private:
  HeadLayout layout_;
  int64_t layers_, heads_;
  std::vector<Buffer<std::byte>> blocks_;
  std::vector<const std::byte*> pointers_;
};

}  // namespace quasar
