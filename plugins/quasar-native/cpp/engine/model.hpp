// A decoder-only transformer as data: what its layers compute and with which weights. Whoever computes with one has it
// as a constant.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "products/linear.hpp"
#include "rows/kernels.hpp"

namespace quasar {

using Vector = std::vector<float>;  // empty: there is none

// One or several products of the same input, whose outputs follow each other.
struct Projection {
  std::vector<std::shared_ptr<Linear>> parts;
  Vector bias;  // of all parts together

  int64_t out() const;
  Memory begin() const { return parts.front()->values(); }  // what its product reads first
};

// How positions turn queries and keys (rotary embedding, Su et al. 2021).
struct Rope {
  Vector inverse_frequencies;  // one for each pair of dimensions; twice as many dimensions are turned
  float scaling = 1.0f;        // of cosines and sines
};

struct Layer {
  Vector input_norm, post_attention_norm, pre_mlp_norm, post_mlp_norm;  // the second and the last: Gemma only
  Vector query_norm, key_norm;                                         // per head
  Projection qkv, attention_out, gate_up, down;
  int64_t window = 0;  // positions that a query sees, its own included; 0: all
  int rope = -1;       // index into Model::ropes; -1: positions do not matter
};

struct Embedding {
  const void* weight = nullptr;  // [vocab, hidden]; borrowed
  bool is_bfloat16 = false;      // else float32
  float scale = 1.0f;
};

struct Model {
  int64_t vocab = 0, hidden = 0, intermediate = 0, heads = 0, key_value_heads = 0, head_dim = 0;
  int64_t max_length = 0;  // 0: unbounded
  float epsilon = 0, attention_scaling = 0;
  float attention_soft_cap = 0, logit_soft_cap = 0;  // 0: none
  Activation activation = Activation::silu;
  Embedding embedding;
  std::vector<Rope> ropes;
  std::vector<Layer> layers;
  Vector final_norm;
  Projection head;

  // Throws std::invalid_argument where sizes do not fit each other.
  void check() const;
  int64_t bytes() const;  // that one forward reads of all weights

  int64_t n_layers() const { return static_cast<int64_t>(layers.size()); }
  int64_t query_columns() const { return heads * head_dim; }
  int64_t qkv_columns() const { return (heads + 2 * key_value_heads) * head_dim; }
};

}  // namespace quasar
