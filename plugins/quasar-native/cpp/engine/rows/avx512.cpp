#include "products/lanes/avx512.hpp"
#include "table.hpp"

namespace quasar {

extern const RowKernels kAvx512Rows = make_row_kernels<Avx512Lanes>();

}  // namespace quasar
