// What keys and values may be stored in: one table, by which names, sizes and code are found.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace quasar {

enum class CacheFormat { float32, bfloat16, int8 };

struct CacheFormatInfo {
  CacheFormat format;
  std::string_view name;
  int64_t value_bytes;
  bool scaled;  // each key and each value has a scale of its own
};

// Indexed by format; RowKernels::of_cache has the code in the same order.
constexpr std::array<CacheFormatInfo, 3> kCacheFormats{{
    {CacheFormat::float32, "float32", 4, false},
    {CacheFormat::bfloat16, "bfloat16", 2, false},
    {CacheFormat::int8, "int8", 1, true},
}};

constexpr const CacheFormatInfo& info_of(CacheFormat format) { return kCacheFormats[static_cast<size_t>(format)]; }

// Throws std::invalid_argument for a name that is not in the table.
CacheFormat cache_format_named(std::string_view name);

constexpr int64_t kBlockPositions = 64;  // positions in a block of the cache

// One key-value head of one layer in one block of the cache: keys [head_dim, positions] (transposed, so that the
// scores of 16 positions are computed at once), values [positions, padded_dim], and where they are scaled a scale of
// each.
struct HeadLayout {
  CacheFormat format;
  int64_t head_dim, padded_dim;  // padded to a multiple of 16; what is padded stays zero
  int64_t values, key_scales, value_scales, bytes;  // offsets from the head's begin, and its size

  HeadLayout(CacheFormat format, int64_t head_dim);
};

}  // namespace quasar
