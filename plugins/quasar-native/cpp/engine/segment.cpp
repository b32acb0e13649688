#include "segment.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "errors.hpp"

namespace quasar {
namespace {

void check_token_ids(const int32_t* token_ids, int64_t n, int64_t vocab) {
  for (int64_t i = 0; i < n; ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= vocab) {
      throw std::out_of_range("token id " + std::to_string(token_ids[i]) + " is outside 0..." +
                              std::to_string(vocab - 1));
    }
  }
}

void check_segment(const Model& model, const Segment& segment) {
  if (!segment.cache->fits(model)) throw std::invalid_argument("a cache that was made for another model");
  if (segment.n_logits < 0 || segment.n_logits > segment.n || segment.n_hidden < 0 || segment.n_hidden > segment.n) {
    throw std::invalid_argument(std::to_string(segment.n_logits) + " rows of logits and " +
                                std::to_string(segment.n_hidden) + " of hidden states of " +
                                std::to_string(segment.n) + " tokens");
  }
  check_token_ids(segment.token_ids, segment.n, model.vocab);
  const int64_t length = segment.cache->length() + segment.n;
  if (model.max_length > 0 && length > model.max_length) {
    throw ContextOverflow("the sequence would have " + std::to_string(length) + " tokens, but the model's context is " +
                          std::to_string(model.max_length));
  }
}

}  // namespace

void check_segments(const Model& model, const std::vector<Segment>& segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    check_segment(model, segments[i]);
    for (size_t other = 0; other < i; ++other) {
      if (segments[other].cache == segments[i].cache) throw std::invalid_argument("two segments with one cache");
    }
  }
}

std::vector<Pass> passes_of(const std::vector<Segment>& segments) {
  std::vector<Pass> passes;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    for (int64_t done = 0; done < segment.n;) {
      if (passes.empty() || passes.back().rows == kPassRows) passes.emplace_back();
      Pass& pass = passes.back();
      const int64_t rows = std::min(kPassRows - pass.rows, segment.n - done), end = done + rows;
      const auto wanted = [&](int64_t last) { return std::max<int64_t>(0, end - std::max(done, segment.n - last)); };
      const Stretch stretch{segment.cache,
                            segment.token_ids + done,
                            static_cast<int64_t>(i),
                            pass.rows,
                            rows,
                            segment.cache->length() + done,
                            wanted(segment.n_logits),
                            wanted(segment.n_hidden)};
      pass.stretches.push_back(stretch);
      pass.rows += rows;
      pass.n_logits += stretch.n_logits;
      pass.n_hidden += stretch.n_hidden;
      done = end;
    }
  }
  return passes;
}

}  // namespace quasar
