#include "products/lanes/portable.hpp"
#include "table.hpp"

namespace quasar {

extern const RowKernels kPortableRows = make_row_kernels<PortableLanes>();

}  // namespace quasar
