#include "session.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "errors.hpp"
#include "layer_attention.hpp"
#include "products.hpp"

namespace quasar {
namespace {

// A prompt is computed in blocks of so many rows, which bounds the scratch memory.
constexpr int64_t kRows = 128;

void check_token_ids(const int32_t* token_ids, int64_t n, int64_t vocab) {
  for (int64_t i = 0; i < n; ++i) {
    if (token_ids[i] < 0 || token_ids[i] >= vocab) {
      throw std::out_of_range("token id " + std::to_string(token_ids[i]) + " is outside 0..." +
                              std::to_string(vocab - 1));
    }
  }
}

void copy_bfloat16(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &word, sizeof(word));
  }
}

}  // namespace

Session::Session(std::shared_ptr<const Model> model, CacheType cache)
    : model_(std::move(model)),
      cache_(cache, static_cast<int64_t>(model_->layers.size()), model_->key_value_heads, model_->head_dim) {}

void Session::truncate(int64_t length) { length_ = std::clamp<int64_t>(length, 0, length_); }

void Session::forward(const int32_t* token_ids, int64_t n, int64_t n_logits, float* logits, float* hidden) {
  const Model& model = *model_;
  check_token_ids(token_ids, n, model.vocab);
  if (model.max_length > 0 && length_ + n > model.max_length) {
    throw ContextOverflow("the sequence would have " + std::to_string(length_ + n) + " tokens, but the model's context is " +
                          std::to_string(model.max_length));
  }
  std::lock_guard lock(model.busy);
  cache_.reserve(length_ + n);
  for (int64_t done = 0; done < n; done += kRows) {
    const int64_t rows = std::min(kRows, n - done);
    const int64_t wanted = std::max<int64_t>(0, done + rows - std::max(done, n - n_logits));
    embed(token_ids + done, rows);
    turn_tables(rows, length_ + done);
    run_layers(rows, length_ + done);
    finish(rows, wanted, length_ + done, logits, hidden);
    logits += wanted * model.vocab;
    if (hidden != nullptr) hidden += wanted * model.hidden;
  }
  length_ += n;
}

void Session::embed(const int32_t* token_ids, int64_t rows) {
  const Embedding& embedding = model_->embedding;
  const int64_t hidden = model_->hidden;
  float* residual = model_->workspace.residual.at_least(rows * hidden);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = residual + row * hidden;
    const int64_t begin = token_ids[row] * hidden;
    if (embedding.is_bfloat16) {
      copy_bfloat16(static_cast<const uint16_t*>(embedding.weight) + begin, hidden, to);
    } else {
      std::memcpy(to, static_cast<const float*>(embedding.weight) + begin, sizeof(float) * hidden);
    }
    if (embedding.scale != 1.0f) std::for_each(to, to + hidden, [&](float& value) { value *= embedding.scale; });
  }
}

// Cosines and sines of all ropes: [ropes, rows, head_dim / 2], of which a rope may fill less.
void Session::turn_tables(int64_t rows, int64_t at) {
  const int64_t half = model_->head_dim / 2, count = static_cast<int64_t>(model_->ropes.size());
  float* cosines = model_->workspace.cosines.at_least(count * rows * half);
  float* sines = model_->workspace.sines.at_least(count * rows * half);
  for (int64_t i = 0; i < count; ++i) {
    const Rope& rope = model_->ropes[i];
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t offset = (i * rows + row) * half;
      for (size_t pair = 0; pair < rope.inverse_frequencies.size(); ++pair) {
        const float angle = static_cast<float>(at + row) * rope.inverse_frequencies[pair];
        cosines[offset + pair] = std::cos(angle) * rope.scaling;
        sines[offset + pair] = std::sin(angle) * rope.scaling;
      }
    }
  }
}

void Session::run_layers(int64_t rows, int64_t at) {
  const Model& model = *model_;
  const RowKernels& kernels = model.kernels;
  Workspace& space = model.workspace;
  const int64_t hidden = model.hidden;
  float* residual = space.residual.at_least(rows * hidden);
  float* normed = space.normed.at_least(rows * hidden);
  float* mixed = space.mixed.at_least(rows * model.heads * model.head_dim);
  float* projected = space.projected.at_least(rows * hidden);
  float* gate_up = space.gate_up.at_least(rows * 2 * model.intermediate);
  float* gated = space.gated.at_least(rows * model.intermediate);

  const auto norm = [&](const float* inputs, const Vector& weight, float* outputs, int64_t row) {
    kernels.rms_norm(inputs + row * hidden, weight.data(), model.epsilon, hidden, outputs + row * hidden);
  };
  // residual += projected, which Gemma norms first; what follows is normed in turn.
  const auto add_and_norm = [&](const Vector& own_norm, const Vector& next_norm) {
    for_rows(*model.pool, rows, hidden, [&](int64_t row) {
      if (!own_norm.empty()) norm(projected, own_norm, projected, row);
      kernels.add(residual + row * hidden, projected + row * hidden, hidden);
      norm(residual, next_norm, normed, row);
    });
  };

  const int64_t n_layers = static_cast<int64_t>(model.layers.size());
  const auto first_norm = [&](int64_t index) -> const Vector& {
    return index < n_layers ? model.layers[index].input_norm : model.final_norm;
  };
  for_rows(*model.pool, rows, hidden, [&](int64_t row) { norm(residual, first_norm(0), normed, row); });
  for (int64_t index = 0; index < n_layers; ++index) {
    const Layer& layer = model.layers[index];
    float* qkv = space.qkv.at_least(rows * layer.qkv.out());
    multiply(model, layer.qkv, normed, rows, qkv, layer.attention_out.begin());
    LayerAttention{model, layer, index, cache_, rows, at}.run();
    multiply(model, layer.attention_out, mixed, rows, projected, layer.gate_up.begin());
    add_and_norm(layer.post_attention_norm, layer.pre_mlp_norm);
    multiply(model, layer.gate_up, normed, rows, gate_up, layer.down.begin());
    const Columns gates = columns(layer.gate_up, gate_up, rows, 0);
    const Columns ups = columns(layer.gate_up, gate_up, rows, model.intermediate);
    for_rows(*model.pool, rows, 8 * model.intermediate, [&](int64_t row) {
      kernels.gate(model.activation, gates.row(row), ups.row(row), model.intermediate,
                   gated + row * model.intermediate);
    });
    const Projection& next = index + 1 < n_layers ? model.layers[index + 1].qkv : model.head;
    multiply(model, layer.down, gated, rows, projected, next.begin());
    add_and_norm(layer.post_mlp_norm, first_norm(index + 1));
  }
}

// Logits of the last `wanted` of the rows, whose last norm is done.
void Session::finish(int64_t rows, int64_t wanted, int64_t at, float* logits, float* hidden) {
  if (wanted == 0) return;
  const Model& model = *model_;
  const RowKernels& kernels = model.kernels;
  const float* last = model.workspace.normed.at_least(rows * model.hidden) + (rows - wanted) * model.hidden;
  if (hidden != nullptr) std::memcpy(hidden, last, sizeof(float) * wanted * model.hidden);
  multiply(model, model.head, last, wanted, logits, {});
  std::atomic<int64_t> first_bad{wanted};
  for_rows(*model.pool, wanted, model.vocab, [&](int64_t row) {
    float* values = logits + row * model.vocab;
    if (model.logit_soft_cap != 0.0f) kernels.soft_cap(values, model.logit_soft_cap, model.vocab);
    if (kernels.all_finite(last + row * model.hidden, model.hidden) && kernels.all_finite(values, model.vocab)) return;
    for (int64_t least = first_bad; row < least && !first_bad.compare_exchange_weak(least, row);) {
    }
  });
  if (const int64_t row = first_bad; row < wanted) {
    throw NotFinite("the logits at position " + std::to_string(at + rows - wanted + row) +
                    " of the sequence are not finite (non-finite weights, or an overflow)");
  }
}

}  // namespace quasar
