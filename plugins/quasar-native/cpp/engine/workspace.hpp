// Scratch memory of a forward: it grows to what the largest one needed and is then used again.
#pragma once

#include "buffer.hpp"

namespace quasar {

struct Workspace {
  Buffer<float> residual, normed, qkv, mixed, projected, gate_up, gated, cosines, sines, scratch;
};

}  // namespace quasar
