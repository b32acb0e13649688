// The row kernels for avx2; the flags are those of engine.cmake.
#define QUASAR_ROW_KERNELS kAvx2RowKernels
#define QUASAR_ROW_KERNELS_NAME "avx2"
#include "row_kernels.inc"
