// The extension module: what Python sees is bound beside what it binds.
#include <nanobind/nanobind.h>

namespace quasar {
void bind_linear(nanobind::module_& module);
#ifdef QUASAR_ENGINE
void bind_engine(nanobind::module_& module);
#endif
}  // namespace quasar

NB_MODULE(_native, module) {
  quasar::bind_linear(module);
#ifdef QUASAR_ENGINE
  quasar::bind_engine(module);
#endif
}
