#include "row_kernels.hpp"

namespace quasar {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t size_of(CacheType type) { return type == CacheType::float32 ? 4 : type == CacheType::bfloat16 ? 2 : 1; }

}  // namespace

HeadLayout::HeadLayout(CacheType type, int64_t head_dim)
    : type(type), head_dim(head_dim), padded_dim((head_dim + 15) / 16 * 16) {
  values = aligned(head_dim * kBlockPositions * size_of(type));
  key_scales = values + aligned(padded_dim * kBlockPositions * size_of(type));
  const int64_t scales = type == CacheType::int8 ? kBlockPositions * static_cast<int64_t>(sizeof(float)) : 0;
  value_scales = key_scales + scales;
  bytes = value_scales + scales;
}

int64_t attention_scratch(const HeadLayout& layout, int64_t seen, int64_t rows, int64_t heads) {
  const int64_t blocks = (seen + rows) / kBlockPositions + 2;  // seen + rows - 1 positions, which begin anywhere
  return rows * heads * (blocks * kBlockPositions + layout.padded_dim);
}

const RowKernels& row_kernels(std::string_view instructions) {
#ifdef QUASAR_ENGINE_X86
  if (instructions.starts_with("avx512")) return kAvx512RowKernels;
  if (instructions.starts_with("avx")) return kAvx2RowKernels;
#endif
  (void)instructions;
  return kPortableRowKernels;
}

}  // namespace quasar
