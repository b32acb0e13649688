#include "layer_attention.hpp"

#include <algorithm>

#include "products.hpp"

namespace quasar {

void LayerAttention::run() const {
  const int64_t dim = model.head_dim, heads = model.heads, shared = model.key_value_heads;
  Workspace& space = model.workspace;
  float* qkv = space.qkv.at_least(rows * layer.qkv.out());
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

  const int64_t together = heads / shared;
  float* mixed = space.mixed.at_least(rows * heads * dim);
  const int64_t scratch = attention_scratch(0, at + rows, together);
  const int64_t seen = layer.window > 0 ? std::min(layer.window, at + rows) : at + rows;
  // Jobs that run at the same time need scratch memory of their own: there is one for each part of the loop.
  const int64_t jobs = rows * shared, work = 2 * together * dim * seen;
  const int64_t parts = std::min<int64_t>(jobs, 4 * model.pool->size());
  float* scores = space.scores.at_least(parts * scratch);
  const auto attend_part = [&](int64_t part) {
    for (int64_t job = part; job < jobs; job += parts) {
      const int64_t row = job / shared, head = job % shared;
      attend(row, head, queries.row(row), mixed + row * heads * dim, scores + part * scratch);
    }
  };
  for_rows(*model.pool, parts, jobs * work / parts, attend_part, layer.attention_out.begin());
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

void LayerAttention::attend(int64_t row, int64_t key_value_head, const float* queries, float* outputs,
                            float* scores) const {
  const int64_t together = model.heads / model.key_value_heads, first = key_value_head * together * model.head_dim;
  Attention job{};
  job.layout = &cache.layout();
  job.blocks = cache.blocks();
  job.head_offset = cache.head_offset(index, key_value_head);
  job.end = at + row + 1;
  job.begin = layer.window > 0 ? std::max<int64_t>(0, job.end - layer.window) : 0;
  job.heads = together;
  job.queries = queries + first;
  job.outputs = outputs + first;
  job.scores = scores;
  job.scaling = model.attention_scaling;
  job.soft_cap = model.attention_soft_cap;
  model.kernels.attend(job);
}

}  // namespace quasar
