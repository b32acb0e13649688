#include "cache.hpp"

namespace quasar {

Cache::Cache(CacheType type, int64_t layers, int64_t heads, int64_t head_dim)
    : layout_(type, head_dim), layers_(layers), heads_(heads) {}

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
