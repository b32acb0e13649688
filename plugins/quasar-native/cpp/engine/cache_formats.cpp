#include "cache_formats.hpp"

#include <stdexcept>
#include <string>

namespace quasar {
namespace {

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

CacheFormat cache_format_named(std::string_view name) {
  std::string names;
  for (const CacheFormatInfo& info : kCacheFormats) {
    if (info.name == name) return info.format;
    if (!names.empty()) names += ", ";
    names += info.name;
  }
  throw std::invalid_argument("a cache in '" + std::string(name) + "', expected one of " + names);
}

HeadLayout::HeadLayout(CacheFormat format, int64_t head_dim)
    : format(format), head_dim(head_dim), padded_dim((head_dim + 15) / 16 * 16) {
  const CacheFormatInfo& info = info_of(format);
  values = aligned(head_dim * kBlockPositions * info.value_bytes);
  key_scales = values + aligned(padded_dim * kBlockPositions * info.value_bytes);
  const int64_t scales = info.scaled ? kBlockPositions * static_cast<int64_t>(sizeof(float)) : 0;
  value_scales = key_scales + scales;
  bytes = value_scales + scales;
}

}  // namespace quasar
