// The attention of one layer, between its two products.
#pragma once

#include <cstdint>

#include "cache.hpp"
#include "model.hpp"
#include "products.hpp"

namespace quasar {

struct LayerAttention {
  const Model& model;
  const Layer& layer;
  int64_t index;  // of the layer
  Cache& cache;
  int64_t rows, at;  // positions at..at+rows-1

  // Reads the workspace's qkv, cosines and sines, appends to the cache and writes the workspace's mixed.
  void run() const;

 private:
  void prepare(int64_t row, float* head, const Vector& norm) const;
  void attend(const Columns& queries, float* mixed) const;
  void attend_head(int64_t head, int64_t first, const Columns& queries, float* mixed, float* scratch) const;
};

}  // namespace quasar
