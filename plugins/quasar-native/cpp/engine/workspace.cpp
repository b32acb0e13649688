#include "workspace.hpp"

#include <utility>

namespace quasar {
namespace {

// A sequence that grows by a few positions a step does not need other memory in each.
constexpr int64_t kSeenStep = 512;

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

void Workspace::fit(const Model& model, int64_t rows, int64_t seen, int64_t attentions) {
  const int64_t angles = static_cast<int64_t>(model.ropes.size()) * (model.head_dim / 2);
  attention_stride = rounded_up(attention_scratch(model.head_dim, rounded_up(seen, kSeenStep), kAttentionRows,
                                                  model.heads / model.key_value_heads), 16);
  const std::pair<float**, int64_t> parts[] = {
      {&residual, rows * model.hidden},
      {&normed, rows * model.hidden},
      {&projected, rows * model.hidden},
      {&qkv, rows * model.qkv_columns()},
      {&mixed, rows * model.query_columns()},
      {&gate_up, rows * 2 * model.intermediate},
      {&gated, rows * model.intermediate},
      {&cosines, rows * angles},
      {&sines, rows * angles},
      {&attention, attentions * attention_stride},
  };
  const auto on_cache_lines = [](int64_t floats) { return rounded_up(floats, 16); };
  int64_t total = 0;
  for (const auto& [part, size] : parts) total += on_cache_lines(size);
  float* at = memory_.at_least(static_cast<size_t>(total));
  for (const auto& [part, size] : parts) {
    *part = at;
    at += on_cache_lines(size);
  }
}

}  // namespace quasar
