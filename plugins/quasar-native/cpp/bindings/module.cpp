// The extension module: what Python sees is bound here, one file a subject.
#include <nanobind/nanobind.h>

namespace quasar {
void bind_products(nanobind::module_& module);
void bind_model(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
}  // namespace quasar

NB_MODULE(_native, module) {
  // Caches of Python outlive the module; what they hold is freed with the process.
  nanobind::set_leak_warnings(false);
  quasar::bind_products(module);
  quasar::bind_model(module);
  quasar::bind_engine(module);
}
