#include "engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace quasar {
namespace {

void check_hidden(const Model& model, const std::vector<HiddenOutput>& hidden) {
  for (const HiddenOutput& output : hidden) {
    if (output.index < 0 || output.index > model.n_layers()) {
      throw std::invalid_argument("hidden states behind layer " + std::to_string(output.index) + " of " +
                                  std::to_string(model.n_layers()));
    }
  }
}

}  // namespace

Engine::Engine(std::shared_ptr<ThreadPool> pool, std::string_view instructions)
    : pool_(std::move(pool)), kernels_(row_kernels(instructions)) {}

void Engine::forward(const Model& model, const std::vector<Segment>& segments, float* logits,
                     std::vector<HiddenOutput> hidden) {
  std::lock_guard lock(busy_);
  check_segments(model, segments);
  check_hidden(model, hidden);
  const std::vector<Pass> passes = passes_of(segments);
  int64_t rows = 0, seen = 0;
  for (const Pass& pass : passes) rows = std::max(rows, pass.rows);
  for (const Segment& segment : segments) {
    const int64_t length = segment.cache->length() + segment.n;
    segment.cache->reserve(length);
    seen = std::max(seen, length);
  }
  space_.fit(model, rows, seen, kAttentionsPerThread * pool_->size());
  for (const Pass& pass : passes) {
    Forward(model, pass, space_, *pool_, kernels_).run(logits, hidden);
    logits += pass.n_logits * model.vocab;
    for (HiddenOutput& output : hidden) output.rows += pass.n_hidden * model.hidden;
  }
  for (const Segment& segment : segments) segment.cache->advance(segment.cache->length() + segment.n);
}

}  // namespace quasar
