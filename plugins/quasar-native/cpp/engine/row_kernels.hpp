// What a decoder computes row by row beside its products, for one instruction set.
//
// Every function sees one row at a time and goes through it in one order, so its bits depend on nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace quasar {

enum class Activation { silu, gelu_tanh };
enum class CacheType { float32, bfloat16, int8 };

constexpr int64_t kBlockPositions = 64;  // positions in a block of the cache

// One key-value head of one layer in one block of the cache: keys [head_dim, positions] (transposed, so that the
// scores of 16 positions are computed at once), values [positions, padded_dim], and for int8 a scale of each.
struct HeadLayout {
  CacheType type;
  int64_t head_dim, padded_dim;  // padded to a multiple of 16; what is padded stays zero
  int64_t values, key_scales, value_scales, bytes;  // offsets from the head's begin, and its size

  HeadLayout(CacheType type, int64_t head_dim);
};

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
  int64_t begin(int64_t i) const { return window > 0 && end(i) > window ? end(i) - window : 0; }
  int64_t end(int64_t i) const { return at + i + 1; }
};

struct RowKernels {
  const char* name;
  // outputs = inputs / sqrt(mean(inputs^2) + epsilon) * weight; inputs may be outputs.
  void (*rms_norm)(const float* inputs, const float* weight, float epsilon, int64_t n, float* outputs);
  void (*add)(float* to, const float* from, int64_t n);
  // outputs = activation(gate) * up
  void (*gate)(Activation activation, const float* gate, const float* up, int64_t n, float* outputs);
  // The pairs (i, i + half) are turned by the angles whose cosines and sines are given.
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t half);
  void (*soft_cap)(float* values, float cap, int64_t n);
  bool (*all_finite)(const float* values, int64_t n);
  void (*remember)(const HeadLayout& layout, std::byte* head, int64_t slot, const float* key, const float* value);
  void (*attend)(const Attention& attention);
};

// Floats that an attention of so many rows and heads needs, where a row sees at most `seen` positions.
int64_t attention_scratch(const HeadLayout& layout, int64_t seen, int64_t rows, int64_t heads);

// For one of the instruction sets that products have names for, which must be one of this CPU.
const RowKernels& row_kernels(std::string_view instructions);

extern const RowKernels kPortableRowKernels;
#ifdef QUASAR_ENGINE_X86
extern const RowKernels kAvx2RowKernels, kAvx512RowKernels;
#endif

}  // namespace quasar
