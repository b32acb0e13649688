// What can go wrong in a forward; each becomes a Python exception of its own.
#pragma once

#include <stdexcept>

namespace quasar {

struct ContextOverflow : std::length_error {
  using std::length_error::length_error;
};

struct NotFinite : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace quasar
