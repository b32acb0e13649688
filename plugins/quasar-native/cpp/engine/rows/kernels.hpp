// What a decoder computes row by row beside its products, for one instruction set.
//
// Every function sees one row at a time and goes through it in one order, so its bits depend on nothing else.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/cache_formats.hpp"
#include "products/lanes/lanes.hpp"

namespace quasar {

enum class Activation { silu, gelu_tanh };

constexpr int64_t kAttentionRows = 4;  // rows of an attention at most

// Attention of the query heads that share one key-value head, at one position or several that follow each other.
struct Attention {
  const HeadLayout* layout;
  const std::byte* const* blocks;  // of the cache, from position 0 on
  int64_t head_offset;             // of the head in each block
  int64_t at, rows;                // positions at..at+rows-1
  int64_t window;                  // positions that each sees, its own included; 0: all
  int64_t heads;
  const float* queries;  // a row is [heads, head_dim]
  int64_t query_stride;
  float* outputs;  // likewise
  int64_t output_stride;
  float* scratch;  // see attention_scratch
  float scaling, soft_cap;  // soft_cap 0: none

  // Row i sees positions begin(i)..end(i)-1.
  QUASAR_INLINE int64_t begin(int64_t i) const { return window > 0 && end(i) > window ? end(i) - window : 0; }
  QUASAR_INLINE int64_t end(int64_t i) const { return at + i + 1; }
};

// Floats that an attention of so many rows and heads needs, where a row sees at most `seen` positions.
int64_t attention_scratch(int64_t head_dim, int64_t seen, int64_t rows, int64_t heads);

// What depends on the format of the cache.
struct CacheKernels {
  void (*remember)(const HeadLayout& layout, std::byte* head, int64_t slot, const float* key, const float* value);
  void (*attend)(const Attention& attention);
};

struct RowKernels {
  // outputs = inputs / sqrt(mean(inputs^2) + epsilon) * weight; inputs may be outputs.
  void (*rms_norm)(const float* inputs, const float* weight, float epsilon, int64_t n, float* outputs);
  void (*add)(float* to, const float* from, int64_t n);
  // outputs = activation(gate) * up
  void (*gate)(Activation activation, const float* gate, const float* up, int64_t n, float* outputs);
  // The pairs (i, i + half) are turned by the angles whose cosines and sines are given.
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t half);
  void (*soft_cap)(float* values, float cap, int64_t n);
  bool (*all_finite)(const float* values, int64_t n);
  std::array<CacheKernels, kCacheFormats.size()> of_cache;

  const CacheKernels& of(CacheFormat format) const { return of_cache[static_cast<size_t>(format)]; }
};

// For one of the instruction sets that products have names for, which must be one of this CPU.
const RowKernels& row_kernels(std::string_view instructions);

extern const RowKernels kPortableRows;
#if defined(__x86_64__) || defined(_M_X64)
extern const RowKernels kAvx2Rows, kAvx512Rows;
#endif

}  // namespace quasar
