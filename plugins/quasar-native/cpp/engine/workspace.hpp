// Scratch memory of a forward: one piece, sized when the forward begins and kept for the next.
#pragma once

#include <cstdint>

#include "memory/buffer.hpp"
#include "model.hpp"

namespace quasar {

constexpr int64_t kAttentionsPerThread = 4;  // parts of the loop over attentions, each with scratch memory

class Workspace {
 public:
  // Room for passes of `rows` rows that see `seen` positions at most, and for so many attentions at the same time.
  // What it held is lost. Throws std::bad_alloc.
  void fit(const Model& model, int64_t rows, int64_t seen, int64_t attentions);

  // Floats for each row: residual, normed, projected [hidden]; qkv [query, key and value heads]; mixed [query heads];
  // gate_up [2 * intermediate]; gated [intermediate].
  float *residual = nullptr, *normed = nullptr, *projected = nullptr, *qkv = nullptr, *mixed = nullptr;
  float *gate_up = nullptr, *gated = nullptr;
  // Cosines and sines of all ropes: [ropes, rows, head_dim / 2], of which a rope may fill less.
  float *cosines = nullptr, *sines = nullptr;
  // Of the attentions, `attention_stride` floats apart.
  float* attention = nullptr;
  int64_t attention_stride = 0;

 private:
  Buffer<float> memory_;
};

}  // namespace quasar
