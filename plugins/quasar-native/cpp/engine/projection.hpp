// Products with the outputs of several parts in one buffer.
#pragma once

#include <cstdint>

#include "model.hpp"

namespace quasar {

// Columns of a matrix of rows that are `stride` floats apart.
struct Columns {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};

// outputs: room for rows * projection.out() floats. Parts are stored one behind the other, each [rows, out of the part].
// `next` is what the pool's next loop reads.
void multiply(const Projection& projection, const float* inputs, int64_t rows, float* outputs, ThreadPool& pool,
              const RowKernels& kernels, Memory next);

// Where outputs begin..end-1 of a projection are; they may not cross the parts.
Columns columns(const Projection& projection, float* outputs, int64_t rows, int64_t begin);

}  // namespace quasar
