// The extension module: what Python sees is bound beside what it binds.
#include <nanobind/nanobind.h>

namespace quasar {
void bind_linear(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
}  // namespace quasar

NB_MODULE(_native, module) {
  quasar::bind_linear(module);
  quasar::bind_engine(module);
}
