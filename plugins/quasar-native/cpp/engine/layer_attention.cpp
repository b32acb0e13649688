#include "layer_attention.hpp"

#include <algorithm>

namespace quasar {

void LayerAttention::run() const {
  const int64_t dim = model.head_dim, heads = model.heads, shared = model.key_value_heads;
  float* qkv = model.workspace.qkv.at_least(rows * layer.qkv.out());
  const Columns queries = columns(layer.qkv, qkv, rows, 0);
  const Columns keys = columns(layer.qkv, qkv, rows, heads * dim);
  const Columns values = columns(layer.qkv, qkv, rows, (heads + shared) * dim);

  for_rows(*model.pool, rows, 4 * (heads + 2 * shared) * dim, [&](int64_t row) {
    for (int64_t head = 0; head < heads; ++head) prepare(row, queries.row(row) + head * dim, layer.query_norm);
    for (int64_t head = 0; head < shared; ++head) {
      float* key = keys.row(row) + head * dim;
      prepare(row, key, layer.key_norm);
      const float* value = values.row(row) + head * dim;
      const int64_t position = at + row;
      model.kernels.remember(cache.layout(), cache.head(position, index, head), position % kBlockPositions, key, value);
    }
  });
  attend(queries, model.workspace.mixed.at_least(rows * heads * dim));
}

void LayerAttention::prepare(int64_t row, float* head, const Vector& norm) const {
  const RowKernels& kernels = model.kernels;
  if (!norm.empty()) kernels.rms_norm(head, norm.data(), model.epsilon, model.head_dim, head);
  if (layer.rope < 0) return;
  const int64_t offset = (layer.rope * rows + row) * (model.head_dim / 2);
  const int64_t tables = static_cast<int64_t>(model.ropes.size()) * rows * (model.head_dim / 2);
  Workspace& space = model.workspace;
  kernels.rotate(head, space.cosines.at_least(tables) + offset, space.sines.at_least(tables) + offset,
                 static_cast<int64_t>(model.ropes[layer.rope].inverse_frequencies.size()));
}

// A job is some rows of one key-value head. Those of a head follow each other, so that a thread reads few heads.
void LayerAttention::attend(const Columns& queries, float* mixed) const {
  const int64_t shared = model.key_value_heads, together = model.heads / shared;
  const int64_t seen = layer.window > 0 ? std::min(layer.window, at + rows) : at + rows;
  const int64_t row_blocks = (rows + kAttentionRows - 1) / kAttentionRows, jobs = row_blocks * shared;
  // Jobs that run at the same time need scratch memory of their own: there is one for each part of the loop.
  const int64_t parts = std::min<int64_t>(jobs, 4 * model.pool->size());
  const int64_t scratch = attention_scratch(cache.layout(), seen, std::min(rows, kAttentionRows), together);
  float* scratches = model.workspace.scratch.at_least(parts * scratch);
  const auto run_part = [&](int64_t part) {
    for (int64_t job = jobs * part / parts; job < jobs * (part + 1) / parts; ++job) {
      const int64_t first = job % row_blocks * kAttentionRows;
      attend_head(job / row_blocks, first, queries, mixed, scratches + part * scratch);
    }
  };
  const int64_t work = 2 * rows * model.heads * model.head_dim * seen;
  for_rows(*model.pool, parts, work / parts, run_part, layer.attention_out.begin());
}

void LayerAttention::attend_head(int64_t head, int64_t first, const Columns& queries, float* mixed,
                                 float* scratch) const {
  const int64_t together = model.heads / model.key_value_heads, column = head * together * model.head_dim;
  Attention job{};
  job.layout = &cache.layout();
  job.blocks = cache.blocks();
  job.head_offset = cache.head_offset(index, head);
  job.at = at + first;
  job.rows = std::min(rows - first, kAttentionRows);
  job.window = layer.window;
  job.heads = together;
  job.queries = queries.row(first) + column;
  job.query_stride = queries.stride;
  job.output_stride = model.heads * model.head_dim;
  job.outputs = mixed + first * job.output_stride + column;
  job.scratch = scratch;
  job.scaling = model.attention_scaling;
  job.soft_cap = model.attention_soft_cap;
  model.kernels.attend(job);
}

}  // namespace quasar
