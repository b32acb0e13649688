// Arrays of Python. They come through the buffer protocol or DLPack and are never copied: where they are bound with
// noconvert(), one of another type, order or device is refused.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

namespace quasar {

template <class T, size_t dimensions>
using Array = nanobind::ndarray<T, nanobind::ndim<dimensions>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Matrix = Array<T, 2>;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

template <class T>
std::string shape_of(const Matrix<T>& matrix) {
  return "[" + std::to_string(matrix.shape(0)) + ", " + std::to_string(matrix.shape(1)) + "]";
}

}  // namespace quasar
