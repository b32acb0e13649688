// Keys and values of one sequence, in blocks of positions that are allocated as the sequence grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache_formats.hpp"
#include "memory/buffer.hpp"
#include "model.hpp"

namespace quasar {

class Cache {
 public:
  Cache(const Model& model, CacheFormat format);
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Whether its keys and values have the sizes of the model's.
  bool fits(const Model& model) const;

  // Positions whose keys and values are in it.
  int64_t length() const { return length_; }
  // Forgets all positions from `length` on.
  void truncate(int64_t length);
  // Those up to `length` have been written.
  void advance(int64_t length) { length_ = length; }

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
  int64_t length_ = 0;
  std::vector<Buffer<std::byte>> blocks_;
  std::vector<const std::byte*> pointers_;
};

}  // namespace quasar
