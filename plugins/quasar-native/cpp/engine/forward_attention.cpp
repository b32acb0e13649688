// The attention of one layer, between its two products: each row over the cache of its own sequence.
#include <algorithm>

#include "forward.hpp"
#include "threads/loops.hpp"

namespace quasar {
namespace {

int64_t row_blocks(const Stretch& stretch) { return (stretch.n + kAttentionRows - 1) / kAttentionRows; }

}  // namespace

const Stretch& Forward::stretch_of(int64_t row) const {
  const auto behind = std::upper_bound(pass_.stretches.begin(), pass_.stretches.end(), row,
                                       [](int64_t value, const Stretch& stretch) { return value < stretch.first; });
  return *(behind - 1);
}

// A job is some rows of one key-value head. Those of a head follow each other, so that a thread reads few heads.
void Forward::attend(int64_t index) {
  const Layer& layer = model_.layers[static_cast<size_t>(index)];
  for_rows(pool_, pass_.rows, 4 * model_.qkv_columns(),
           [&](int64_t row) { remember(layer, index, stretch_of(row), row); });
  int64_t jobs = 0, seen_by_all = 0;
  for (const Stretch& stretch : pass_.stretches) {
    const int64_t end = stretch.at + stretch.n;
    jobs += row_blocks(stretch) * model_.key_value_heads;
    seen_by_all += stretch.n * (layer.window > 0 ? std::min(layer.window, end) : end);
  }
  // Jobs that run at the same time need scratch memory of their own: there is one for each part of the loop.
  const int64_t parts = std::min<int64_t>(jobs, kAttentionsPerThread * pool_.size());
  const auto run_part = [&](int64_t part) {
    int64_t job = jobs * part / parts, left = jobs * (part + 1) / parts - job;
    for (const Stretch& stretch : pass_.stretches) {
      const int64_t here = row_blocks(stretch) * model_.key_value_heads;
      for (; job < here && left > 0; ++job, --left) {
        attend_rows(layer, index, stretch, job, space_.attention + part * space_.attention_stride);
      }
      job -= here;
      if (left == 0) return;
    }
  };
  for_rows(pool_, parts, 2 * model_.query_columns() * seen_by_all / parts, run_part, layer.attention_out.begin());
}

// Norms and turns the heads of a row, and puts its keys and values into the cache.
void Forward::remember(const Layer& layer, int64_t index, const Stretch& stretch, int64_t row) {
  const int64_t dim = model_.head_dim, heads = model_.heads, shared = model_.key_value_heads;
  float* queries = columns(layer.qkv, space_.qkv, pass_.rows, 0).row(row);
  float* keys = columns(layer.qkv, space_.qkv, pass_.rows, heads * dim).row(row);
  const float* values = columns(layer.qkv, space_.qkv, pass_.rows, (heads + shared) * dim).row(row);
  Cache& cache = *stretch.cache;
  const int64_t position = stretch.position(row);
  const auto put = kernels_.of(cache.layout().format).remember;
  for (int64_t head = 0; head < heads; ++head) prepare_head(layer, row, queries + head * dim, layer.query_norm);
  for (int64_t head = 0; head < shared; ++head) {
    prepare_head(layer, row, keys + head * dim, layer.key_norm);
    put(cache.layout(), cache.head(position, index, head), position % kBlockPositions, keys + head * dim,
        values + head * dim);
  }
}

void Forward::prepare_head(const Layer& layer, int64_t row, float* head, const Vector& norm) {
  if (!norm.empty()) kernels_.rms_norm(head, norm.data(), model_.epsilon, model_.head_dim, head);
  if (layer.rope < 0) return;
  const int64_t offset = (layer.rope * pass_.rows + row) * (model_.head_dim / 2);
  kernels_.rotate(head, space_.cosines + offset, space_.sines + offset,
                  static_cast<int64_t>(model_.ropes[static_cast<size_t>(layer.rope)].inverse_frequencies.size()));
}

void Forward::attend_rows(const Layer& layer, int64_t index, const Stretch& stretch, int64_t job, float* scratch) {
  const int64_t head = job / row_blocks(stretch), first = job % row_blocks(stretch) * kAttentionRows;
  const int64_t together = model_.heads / model_.key_value_heads, column = head * together * model_.head_dim;
  const Columns queries = columns(layer.qkv, space_.qkv, pass_.rows, 0);
  const Cache& cache = *stretch.cache;
  Attention attention{};
  attention.layout = &cache.layout();
  attention.blocks = cache.blocks();
  attention.head_offset = cache.head_offset(index, head);
  attention.at = stretch.at + first;
  attention.rows = std::min(stretch.n - first, kAttentionRows);
  attention.window = layer.window;
  attention.heads = together;
  attention.queries = queries.row(stretch.first + first) + column;
  attention.query_stride = queries.stride;
  attention.output_stride = model_.query_columns();
  attention.outputs = space_.mixed + (stretch.first + first) * attention.output_stride + column;
  attention.scratch = scratch;
  attention.scaling = model_.attention_scaling;
  attention.soft_cap = model_.attention_soft_cap;
  kernels_.of(cache.layout().format).attend(attention);
}

}  // namespace quasar
