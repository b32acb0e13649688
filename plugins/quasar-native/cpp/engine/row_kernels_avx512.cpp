// The row kernels for avx512; the flags are those of engine.cmake.
#define QUASAR_ROW_KERNELS kAvx512RowKernels
#define QUASAR_ROW_KERNELS_NAME "avx512"
#include "row_kernels.inc"
