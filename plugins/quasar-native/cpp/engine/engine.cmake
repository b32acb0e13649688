# The files of the engine: included where ENGINE_SOURCES is known, before it is used.
#
# The row kernels write their sums lane by lane in one order. A product and the sum behind it may become one
# instruction there, which is the same in every call, as each function is compiled once.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  add_compile_definitions(QUASAR_ENGINE_X86)
else()
  list(FILTER ENGINE_SOURCES EXCLUDE REGEX "row_kernels_avx")
endif()
set(ROW_KERNEL_FLAGS -ffp-contract=fast -Wno-psabi -Wno-maybe-uninitialized)
set(ROW_KERNEL_AVX2 ${ROW_KERNEL_FLAGS} -mavx2 -mfma -mf16c)
set_source_files_properties(cpp/engine/row_kernels_portable.cpp PROPERTIES COMPILE_OPTIONS "${ROW_KERNEL_FLAGS}")
set_source_files_properties(cpp/engine/row_kernels_avx2.cpp PROPERTIES COMPILE_OPTIONS "${ROW_KERNEL_AVX2}")
set_source_files_properties(cpp/engine/row_kernels_avx512.cpp PROPERTIES COMPILE_OPTIONS
                            "${ROW_KERNEL_AVX2};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mprefer-vector-width=512")
