#include "dispatch.hpp"

#include <cstdlib>
#include <stdexcept>

#include "linear.hpp"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

namespace quasar {
namespace {

#if defined(__x86_64__) || defined(_M_X64)
// Compilers know this instruction set longer than __builtin_cpu_supports knows its name.
bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> kernels{&kPortable};
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kernels;
  kernels.push_back(&kAvx2);
  if (has_avx_vnni()) kernels.push_back(&kAvxVnni);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) kernels.push_back(&kAvx512);
#endif
  return kernels;
}

}  // namespace

std::vector<std::string> available_instructions() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& kernels_named(const std::string& name) {
  const char* variable = std::getenv("QUASAR_NATIVE_INSTRUCTIONS");
  const std::string wanted = name == "auto" && variable != nullptr ? variable : name;
  const std::vector<const Kernels*> all = available();
  if (wanted == "auto" || wanted.empty()) return *all.back();
  std::string names = "auto";
  for (const Kernels* kernels : all) {
    if (wanted == kernels->name) return *kernels;
    names += std::string(", ") + kernels->name;
  }
  throw std::invalid_argument("instructions='" + wanted + "', this CPU has " + names);
}

const Kernels& default_kernels() { return kernels_named("auto"); }

}  // namespace quasar
