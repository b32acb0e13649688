// Which instruction sets this CPU has.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace quasar {

// Names, the narrowest first: "portable" and those of "avx2", "avx_vnni", "avx512" that this CPU executes.
std::vector<std::string> available_instructions();

// "auto" is what the environment variable QUASAR_NATIVE_INSTRUCTIONS names, else the widest one. Throws
// std::invalid_argument for a name that is not available here.
const Kernels& kernels_named(const std::string& name);

}  // namespace quasar
