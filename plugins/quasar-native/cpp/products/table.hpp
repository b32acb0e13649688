// The table of products of one instruction set, written once for all.
//
// `Isa` is a type of lanes (see lanes/lanes.hpp) that also has
//   Bytes      kLanes x 4 integers, which load8 reads less kLess8
//   Halves     kLanes x 8 integers, which load4 reads: the Bytes low and high, or what dot takes at once
//   Sums       kLanes int32 in the making; dot adds the products of Bytes with 4 int8, or of Halves with two times 4;
//              total ends it as Floats
//   how many rows a pass serves: kChannelRows, kGroupRows, kFloatRows; of how many rows the chains of even and of odd
//   columns fit in the registers: kRowsOfTwoChains; and kTotalsInMemory, whether the sums of one group need all registers
#pragma once

#include "float_product.hpp"
#include "integer_product.hpp"

namespace quasar {

template <class Isa>
constexpr Kernels make_kernels(const char* name) {
  return {name,
          Isa::kLess8,
          Isa::largest,
          Isa::round,
          multiply_integers<Isa, Format::int8>,
          multiply_integers<Isa, Format::int4>,
          {multiply_floats<Isa, Format::int8>, multiply_floats<Isa, Format::int4>, multiply_floats<Isa, Format::bf16>,
           multiply_floats<Isa, Format::f32>}};
}

}  // namespace quasar
