// The row kernels for any compiler's own instruction set; the flags are those of engine.cmake.
#define QUASAR_ROW_KERNELS kPortableRowKernels
#define QUASAR_ROW_KERNELS_NAME "portable"
#include "row_kernels.inc"
