// Attention over a cache, one key-value head and a few rows at a time.
#pragma once

#include "kernels.hpp"
#include "products/lanes/lanes.hpp"
#include "storage.hpp"

namespace quasar {
namespace {

constexpr float kInfinity = __builtin_inff();

// How many accumulators of 16 floats each of so many heads gets: 4, 2 or 1.
template <class L>
constexpr int width_of(int heads) {
  return 4 * heads <= L::kAccumulators ? 4 : 2 * heads <= L::kAccumulators ? 2 : 1;
}

// cap * tanh(x / cap)
template <class L>
QUASAR_INLINE typename L::Floats capped(typename L::Floats x, float cap) {
  const typename L::Floats one = L::broadcast(1.0f);
  return (one - (one + one) / (exponential<L>(x * L::broadcast(2.0f / cap)) + one)) * L::broadcast(cap);
}

// -inf at the positions that are not seen.
template <class L>
QUASAR_INLINE typename L::Floats hide(typename L::Floats scores, int64_t position, int64_t begin, int64_t end) {
  if (position >= begin && position + kLanes <= end) return scores;
  float lane[kLanes];
  L::store(lane, scores);
  for (int i = 0; i < kLanes; ++i) {
    if (position + i < begin || position + i >= end) lane[i] = -kInfinity;
  }
  return L::load(lane);
}

// Where the rows of a job keep what they compute: scores from the block of the first position that any row sees on, and
// sums of values; both per row and head.
struct AttentionScratch {
  int64_t first_block, last_block, stride;
  int heads;
  float* scores;
  float* sums;

  QUASAR_INLINE AttentionScratch(const Attention& job, int heads)
      : first_block(job.begin(0) / kBlockPositions),
        last_block((job.end(job.rows - 1) - 1) / kBlockPositions),
        stride((last_block - first_block + 1) * kBlockPositions),
        heads(heads),
        scores(job.scratch),
        sums(job.scratch + job.rows * heads * stride) {}

  QUASAR_INLINE float* scores_of(int64_t row, int64_t block) const {
    return scores + row * heads * stride + (block - first_block) * kBlockPositions;
  }
};

// Scores of `heads` queries of one row in one block; `width` times 16 positions at once.
template <class L, class Storage, int heads, int width>
QUASAR_INLINE void score(const Attention& job, int64_t row, const float* queries, int64_t block, float* scores,
                         int64_t stride) {
  using Type = typename Storage::Type;
  using Floats = typename L::Floats;
  const int64_t dim = job.layout->head_dim, begin = job.begin(row), end = job.end(row);
  const std::byte* head = job.blocks[block] + job.head_offset;
  constexpr int64_t step = width * kLanes;
  for (int64_t slot = 0; slot < kBlockPositions; slot += step) {
    const int64_t position = block * kBlockPositions + slot;
    if (position + step <= begin || position >= end) continue;
    Floats sums[heads][width];
    QUASAR_UNROLL
    for (int h = 0; h < heads; ++h) {
      QUASAR_UNROLL
      for (int w = 0; w < width; ++w) sums[h][w] = L::broadcast(0.0f);
    }
    const Type* keys = reinterpret_cast<const Type*>(head) + slot;
    for (int64_t i = 0; i < dim; ++i) {
      QUASAR_UNROLL
      for (int w = 0; w < width; ++w) {
        const Floats key = L::load(keys + i * kBlockPositions + w * kLanes);
        QUASAR_UNROLL
        for (int h = 0; h < heads; ++h) sums[h][w] = L::fma(key, L::broadcast(queries[h * dim + i]), sums[h][w]);
      }
    }
    QUASAR_UNROLL
    for (int w = 0; w < width; ++w) {
      QUASAR_UNROLL
      for (int h = 0; h < heads; ++h) {
        Floats values = sums[h][w] * L::broadcast(job.scaling);
        if constexpr (info_of(Storage::kFormat).scaled) {
          values = values * L::load(reinterpret_cast<const float*>(head + job.layout->key_scales) + slot + w * kLanes);
        }
        if (job.soft_cap != 0.0f) values = capped<L>(values, job.soft_cap);
        L::store(scores + h * stride + slot + w * kLanes, hide<L>(values, position + w * kLanes, begin, end));
      }
    }
  }
}

// Scores of positions from..to-1 of the scratch (multiples of 16) become e^(score - largest); returns their sum.
template <class L>
QUASAR_INLINE float soften(float* scores, int64_t from, int64_t to) {
  using Floats = typename L::Floats;
  Floats most = L::broadcast(-kInfinity);
  for (int64_t i = from; i < to; i += kLanes) most = maximum<L>(most, L::load(scores + i));
  const Floats top = L::broadcast(largest_of<L>(most));
  Floats total = L::broadcast(0.0f);
  for (int64_t i = from; i < to; i += kLanes) {
    const Floats weights = exponential<L>(L::load(scores + i) - top);
    L::store(scores + i, weights);
    total = total + weights;
  }
  return sum_of<L>(total);
}

// sums[h, from..from+16*width-1] += weights[h] * values, in the order of the positions of one block that a row sees.
template <class L, class Storage, int heads, int width>
QUASAR_INLINE void mix(const Attention& job, int64_t row, const float* weights, int64_t stride, int64_t block,
                       int64_t from, float* sums) {
  using Type = typename Storage::Type;
  using Floats = typename L::Floats;
  const HeadLayout& layout = *job.layout;
  const std::byte* head = job.blocks[block] + job.head_offset;
  const Type* values = reinterpret_cast<const Type*>(head + layout.values) + from;
  const int64_t base = block * kBlockPositions;
  const int64_t begin = job.begin(row) > base ? job.begin(row) - base : 0;
  const int64_t end = job.end(row) - base < kBlockPositions ? job.end(row) - base : kBlockPositions;
  Floats local[heads][width];
  QUASAR_UNROLL
  for (int h = 0; h < heads; ++h) {
    QUASAR_UNROLL
    for (int w = 0; w < width; ++w) local[h][w] = L::load(sums + h * layout.padded_dim + from + w * kLanes);
  }
  for (int64_t slot = begin; slot < end; ++slot) {
    QUASAR_UNROLL
    for (int w = 0; w < width; ++w) {
      const Floats value = L::load(values + slot * layout.padded_dim + w * kLanes);
      QUASAR_UNROLL
      for (int h = 0; h < heads; ++h) local[h][w] = L::fma(value, L::broadcast(weights[h * stride + slot]), local[h][w]);
    }
  }
  QUASAR_UNROLL
  for (int h = 0; h < heads; ++h) {
    QUASAR_UNROLL
    for (int w = 0; w < width; ++w) L::store(sums + h * layout.padded_dim + from + w * kLanes, local[h][w]);
  }
}

template <class L, class Storage, int heads>
QUASAR_INLINE void mix_all(const Attention& job, int64_t row, const float* weights, int64_t stride, int64_t block,
                           float* sums) {
  constexpr int width = width_of<L>(heads);
  const int64_t dim = job.layout->padded_dim;
  int64_t at = 0;
  for (; at + width * kLanes <= dim; at += width * kLanes) {
    mix<L, Storage, heads, width>(job, row, weights, stride, block, at, sums);
  }
  for (; at < dim; at += kLanes) mix<L, Storage, heads, 1>(job, row, weights, stride, block, at, sums);
}

// The scale of each value is multiplied into its weight. `weights` begin at the block `first`.
QUASAR_INLINE void scale_weights(const Attention& job, int64_t row, int64_t first, float* weights) {
  for (int64_t position = job.begin(row); position < job.end(row); ++position) {
    const std::byte* head = job.blocks[position / kBlockPositions] + job.head_offset;
    const float* scales = reinterpret_cast<const float*>(head + job.layout->value_scales);
    weights[position - first * kBlockPositions] *= scales[position % kBlockPositions];
  }
}

// A row's scores become weights; returns their sum.
template <class L, class Storage>
QUASAR_INLINE float weigh(const Attention& job, int64_t row, int64_t first, float* scores) {
  const int64_t begin = job.begin(row) - first * kBlockPositions, end = job.end(row) - first * kBlockPositions;
  const float total = soften<L>(scores, begin / kLanes * kLanes, (end + kLanes - 1) / kLanes * kLanes);
  if constexpr (info_of(Storage::kFormat).scaled) scale_weights(job, row, first, scores);
  return total;
}

// Block by block, and within a block row by row, so that its keys and values are read from the first cache.
template <class L, class Storage, int heads>
void attend_heads(const Attention& job, const float* queries, float* outputs) {
  const AttentionScratch scratch(job, heads);
  const int64_t padded = job.layout->padded_dim, dim = job.layout->head_dim;
  for (int64_t block = scratch.first_block; block <= scratch.last_block; ++block) {
    for (int64_t row = 0; row < job.rows; ++row) {
      score<L, Storage, heads, width_of<L>(heads)>(job, row, queries + row * job.query_stride, block,
                                          scratch.scores_of(row, block), scratch.stride);
    }
  }
  float totals[kAttentionRows][heads];
  for (int64_t row = 0; row < job.rows; ++row) {
    for (int h = 0; h < heads; ++h) {
      float* scores = scratch.scores + (row * heads + h) * scratch.stride;
      totals[row][h] = weigh<L, Storage>(job, row, scratch.first_block, scores);
    }
  }
  for (int64_t i = 0; i < job.rows * heads * padded; i += kLanes) L::store(scratch.sums + i, L::broadcast(0.0f));
  for (int64_t block = scratch.first_block; block <= scratch.last_block; ++block) {
    for (int64_t row = 0; row < job.rows; ++row) {
      mix_all<L, Storage, heads>(job, row, scratch.scores_of(row, block), scratch.stride, block,
                           scratch.sums + row * heads * padded);
    }
  }
  for (int64_t row = 0; row < job.rows; ++row) {
    for (int h = 0; h < heads; ++h) {
      const float* sums = scratch.sums + (row * heads + h) * padded;
      float* to = outputs + row * job.output_stride + h * dim;
      for (int64_t i = 0; i < dim; i += kLanes) {
        store_first<L>(to + i, L::load(sums + i) * L::broadcast(1.0f / totals[row][h]), dim - i);
      }
    }
  }
}

template <class L, class Storage>
void attend(const Attention& job) {
  const int64_t dim = job.layout->head_dim;
  int64_t head = 0;
  for (; head + 4 <= job.heads; head += 4) {
    attend_heads<L, Storage, 4>(job, job.queries + head * dim, job.outputs + head * dim);
  }
  const float* queries = job.queries + head * dim;
  float* outputs = job.outputs + head * dim;
  if (job.heads - head == 3) attend_heads<L, Storage, 3>(job, queries, outputs);
  if (job.heads - head == 2) attend_heads<L, Storage, 2>(job, queries, outputs);
  if (job.heads - head == 1) attend_heads<L, Storage, 1>(job, queries, outputs);
}

}  // namespace
}  // namespace quasar
