#include "cache.hpp"

#include <algorithm>

namespace quasar {

Cache::Cache(const Model& model, CacheFormat format)
    : layout_(format, model.head_dim), layers_(model.n_layers()), heads_(model.key_value_heads) {}

bool Cache::fits(const Model& model) const {
  return layers_ == model.n_layers() && heads_ == model.key_value_heads && layout_.head_dim == model.head_dim;
}

void Cache::truncate(int64_t length) { length_ = std::clamp<int64_t>(length, 0, length_); }

void Cache::reserve(int64_t length) {
  while (static_cast<int64_t>(blocks_.size()) * kBlockPositions < length) {
    blocks_.reserve(blocks_.size() + 1);
    pointers_.reserve(blocks_.size() + 1);
    // Zeros: padding must be zero, and what a block does not hold yet is read, though never used in a sum.
    Buffer<std::byte> block(static_cast<size_t>(layers_ * heads_ * layout_.bytes));
    block.fill_with_zeros();
    pointers_.push_back(block.data());
    blocks_.push_back(std::move(block));
  }
}

}  // namespace quasar
