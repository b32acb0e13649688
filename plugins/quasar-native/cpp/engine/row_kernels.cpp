#include "row_kernels.hpp"

#include <cstdlib>
#include <cstring>

namespace quasar {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t size_of(CacheType type) { return type == CacheType::float32 ? 4 : type == CacheType::bfloat16 ? 2 : 1; }

const RowKernels& widest() {
#ifdef QUASAR_ENGINE_X86
  const char* wanted = std::getenv("QUASAR_NATIVE_INSTRUCTIONS");
  const bool any = wanted == nullptr || *wanted == '\0';
  if (!any && std::strcmp(wanted, "portable") == 0) return kPortableRowKernels;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && (any || std::strncmp(wanted, "avx512", 6) == 0)) return kAvx512RowKernels;
  if (avx2) return kAvx2RowKernels;
#endif
  return kPortableRowKernels;
}

}  // namespace

HeadLayout::HeadLayout(CacheType type, int64_t head_dim)
    : type(type), head_dim(head_dim), padded_dim((head_dim + 15) / 16 * 16) {
  values = aligned(head_dim * kBlockPositions * size_of(type));
  key_scales = values + aligned(padded_dim * kBlockPositions * size_of(type));
  const int64_t scales = type == CacheType::int8 ? kBlockPositions * static_cast<int64_t>(sizeof(float)) : 0;
  value_scales = key_scales + scales;
  bytes = value_scales + scales;
}

int64_t attention_scratch(int64_t begin, int64_t end, int64_t heads) {
  const int64_t first = begin / kBlockPositions, last = (end - 1) / kBlockPositions;
  return (last - first + 1) * kBlockPositions * heads;
}

const RowKernels& row_kernels() {
  static const RowKernels& chosen = widest();
  return chosen;
}

}  // namespace quasar
