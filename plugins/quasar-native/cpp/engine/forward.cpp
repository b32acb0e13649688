#include "forward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "errors.hpp"
#include "threads/loops.hpp"

namespace quasar {
namespace {

void copy_bfloat16(const uint16_t* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &word, sizeof(word));
  }
}

}  // namespace

void Forward::run(float* logits, const std::vector<HiddenOutput>& hidden) {
  embed();
  make_angles();
  record(0, space_.residual, hidden);
  for_rows(pool_, pass_.rows, model_.hidden,
           [&](int64_t row) { norm(space_.residual, norm_before(0), space_.normed, row); });
  for (int64_t index = 0; index < model_.n_layers(); ++index) {
    run_layer(index);
    if (index + 1 < model_.n_layers()) record(index + 1, space_.residual, hidden);
  }
  if (model_.n_layers() > 0) record(model_.n_layers(), space_.normed, hidden);
  finish(logits);
}

void Forward::embed() {
  const Embedding& embedding = model_.embedding;
  const int64_t hidden = model_.hidden;
  for (const Stretch& stretch : pass_.stretches) {
    for (int64_t i = 0; i < stretch.n; ++i) {
      float* to = space_.residual + (stretch.first + i) * hidden;
      const int64_t begin = stretch.token_ids[i] * hidden;
      if (embedding.is_bfloat16) {
        copy_bfloat16(static_cast<const uint16_t*>(embedding.weight) + begin, hidden, to);
      } else {
        std::memcpy(to, static_cast<const float*>(embedding.weight) + begin, sizeof(float) * hidden);
      }
      if (embedding.scale != 1.0f) std::for_each(to, to + hidden, [&](float& value) { value *= embedding.scale; });
    }
  }
}

void Forward::make_angles() {
  const int64_t half = model_.head_dim / 2;
  for (size_t i = 0; i < model_.ropes.size(); ++i) {
    const Rope& rope = model_.ropes[i];
    for (const Stretch& stretch : pass_.stretches) {
      for (int64_t row = stretch.first; row < stretch.first + stretch.n; ++row) {
        const int64_t offset = (static_cast<int64_t>(i) * pass_.rows + row) * half;
        for (size_t pair = 0; pair < rope.inverse_frequencies.size(); ++pair) {
          const float angle = static_cast<float>(stretch.position(row)) * rope.inverse_frequencies[pair];
          space_.cosines[offset + pair] = std::cos(angle) * rope.scaling;
          space_.sines[offset + pair] = std::sin(angle) * rope.scaling;
        }
      }
    }
  }
}

const Vector& Forward::norm_before(int64_t layer) const {
  return layer < model_.n_layers() ? model_.layers[static_cast<size_t>(layer)].input_norm : model_.final_norm;
}

void Forward::norm(const float* inputs, const Vector& weight, float* outputs, int64_t row) {
  const int64_t at = row * model_.hidden;
  kernels_.rms_norm(inputs + at, weight.data(), model_.epsilon, model_.hidden, outputs + at);
}

// residual += projected, which Gemma norms first; what follows is normed in turn.
void Forward::add_and_norm(const Vector& own_norm, const Vector& next_norm) {
  for_rows(pool_, pass_.rows, model_.hidden, [&](int64_t row) {
    if (!own_norm.empty()) norm(space_.projected, own_norm, space_.projected, row);
    kernels_.add(space_.residual + row * model_.hidden, space_.projected + row * model_.hidden, model_.hidden);
    norm(space_.residual, next_norm, space_.normed, row);
  });
}

void Forward::run_layer(int64_t index) {
  const Layer& layer = model_.layers[static_cast<size_t>(index)];
  const int64_t rows = pass_.rows, intermediate = model_.intermediate;
  const auto product = [&](const Projection& projection, const float* inputs, float* outputs, const Projection& next) {
    multiply(projection, inputs, rows, outputs, pool_, kernels_, next.begin());
  };
  product(layer.qkv, space_.normed, space_.qkv, layer.attention_out);
  attend(index);
  product(layer.attention_out, space_.mixed, space_.projected, layer.gate_up);
  add_and_norm(layer.post_attention_norm, layer.pre_mlp_norm);
  product(layer.gate_up, space_.normed, space_.gate_up, layer.down);
  const Columns gates = columns(layer.gate_up, space_.gate_up, rows, 0);
  const Columns ups = columns(layer.gate_up, space_.gate_up, rows, intermediate);
  for_rows(pool_, rows, 8 * intermediate, [&](int64_t row) {
    kernels_.gate(model_.activation, gates.row(row), ups.row(row), intermediate, space_.gated + row * intermediate);
  });
  const bool last = index + 1 == model_.n_layers();
  product(layer.down, space_.gated, space_.projected, last ? model_.head : model_.layers[static_cast<size_t>(index + 1)].qkv);
  add_and_norm(layer.post_mlp_norm, norm_before(index + 1));
}

void Forward::record(int64_t index, const float* states, const std::vector<HiddenOutput>& hidden) {
  for (const HiddenOutput& output : hidden) {
    if (output.index != index) continue;
    float* to = output.rows;
    for (const Stretch& stretch : pass_.stretches) {
      const int64_t first = stretch.first + stretch.n - stretch.n_hidden, floats = stretch.n_hidden * model_.hidden;
      to = std::copy_n(states + first * model_.hidden, floats, to);
    }
  }
}

// The last n_logits rows of each stretch move together, to the begin of `normed`.
void Forward::gather_wanted_rows() {
  float* to = space_.normed;
  for (const Stretch& stretch : pass_.stretches) {
    const float* from = space_.normed + (stretch.first + stretch.n - stretch.n_logits) * model_.hidden;
    const int64_t floats = stretch.n_logits * model_.hidden;
    if (from != to) std::memmove(to, from, sizeof(float) * static_cast<size_t>(floats));
    to += floats;
  }
}

void Forward::finish(float* logits) {
  const int64_t wanted = pass_.n_logits;
  if (wanted == 0) return;
  gather_wanted_rows();
  multiply(model_.head, space_.normed, wanted, logits, pool_, kernels_, {});
  std::atomic<int64_t> first_bad{wanted};
  for_rows(pool_, wanted, model_.vocab, [&](int64_t row) {
    float* values = logits + row * model_.vocab;
    if (model_.logit_soft_cap != 0.0f) kernels_.soft_cap(values, model_.logit_soft_cap, model_.vocab);
    const float* last = space_.normed + row * model_.hidden;
    if (kernels_.all_finite(last, model_.hidden) && kernels_.all_finite(values, model_.vocab)) return;
    for (int64_t least = first_bad; row < least && !first_bad.compare_exchange_weak(least, row);) {
    }
  });
  if (first_bad < wanted) refuse(first_bad);
}

// The logits of a row are no numbers.
void Forward::refuse(int64_t bad) const {
  for (const Stretch& stretch : pass_.stretches) {
    if (bad < stretch.n_logits) {
      std::string where = std::to_string(stretch.at + stretch.n - stretch.n_logits + bad) + " of the sequence";
      if (stretch.segment > 0) where += " in segment " + std::to_string(stretch.segment);
      throw NotFinite("the logits at position " + where + " are not finite (non-finite weights, or an overflow)");
    }
    bad -= stretch.n_logits;
  }
}

}  // namespace quasar
