// Loops over rows.
#pragma once

#include <cstdint>

#include "pool.hpp"

namespace quasar {

// work(row) for each row, on all threads where it is worth waking them up; `next` is what the pool's next loop reads.
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
