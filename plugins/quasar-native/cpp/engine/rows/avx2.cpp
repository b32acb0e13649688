#include "products/lanes/avx2.hpp"
#include "table.hpp"

namespace quasar {

extern const RowKernels kAvx2Rows = make_row_kernels<Avx2Lanes>();

}  // namespace quasar
