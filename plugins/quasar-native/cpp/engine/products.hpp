// Products with the outputs of several parts in one buffer, and loops over rows.
#pragma once

#include <cstdint>

#include "model.hpp"

namespace quasar {

// Columns of a matrix of `rows` rows, `stride` floats apart.
struct Columns {
  float* data;
  int64_t stride;

  float* row(int64_t i) const { return data + i * stride; }
};

// outputs: room for rows * projection.out() floats. Parts are stored one behind the other, each [rows, out of the part].
// `next` is what the pool's next loop reads.
void multiply(const Model& model, const Projection& projection, const float* inputs, int64_t rows, float* outputs,
              Memory next);

// Where outputs begin..end-1 of a projection are; they may not cross the parts.
Columns columns(const Projection& projection, float* outputs, int64_t rows, int64_t begin);

// work(row) for each row, on all threads where it is worth waking them up; `next` as above.
template <class Work>
void for_rows(ThreadPool& pool, int64_t rows, int64_t work_per_row, const Work& work, Memory next = {}) {
  constexpr int64_t kWorthIt = 32768;  // some ten microseconds
  if (rows > 1 && rows * work_per_row >= kWorthIt) {
    pool.parallel(rows, work, next);
  } else {
    for (int64_t row = 0; row < rows; ++row) work(row);
  }
}

}  // namespace quasar
