#include "kernels.hpp"

namespace quasar {

int64_t attention_scratch(int64_t head_dim, int64_t seen, int64_t rows, int64_t heads) {
  const int64_t blocks = (seen + rows) / kBlockPositions + 2;  // seen + rows - 1 positions, which begin anywhere
  return rows * heads * (blocks * kBlockPositions + (head_dim + 15) / 16 * 16);
}

const RowKernels& row_kernels(std::string_view instructions) {
#if defined(__x86_64__) || defined(_M_X64)
  if (instructions.starts_with("avx512")) return kAvx512Rows;
  if (instructions.starts_with("avx")) return kAvx2Rows;
#endif
  (void)instructions;
  return kPortableRows;
}

}  // namespace quasar
