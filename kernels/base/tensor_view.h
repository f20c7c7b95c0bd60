// TensorView: a borrowed, row-major block of memory with a dtype and a shape. Passed by value; the
// owner (DeviceBuffer, Workspace, a mapped file) must outlive it. Views of constant data are
// ConstTensorView. Rank is 1 to 4; `row_stride` (in elements) separates rows of the first dimension
// and may exceed their length, all inner dimensions are contiguous.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/float_types.h"

namespace lockstep {

enum class DeviceType : uint8_t { kCpu, kCuda };

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct DTypeOf<BF16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kI64;
};

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    CHECK_LE(dims.size(), 4u);
    for (int64_t d : dims) dims_[rank_++] = d;
  }
  int rank() const { return rank_; }
  int64_t operator[](int i) const {
    CHECK(i >= 0 && i < rank_) << "dimension " << i << " of " << ToString() << " ";
    return dims_[i];
  }
  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  void push_back(int64_t d) {
    CHECK_LT(rank_, 4);
    dims_[rank_++] = d;
  }
  bool operator==(const Shape& other) const { return rank_ == other.rank_ && dims_ == other.dims_; }
  bool operator!=(const Shape& other) const { return !(*this == other); }
  // "[7, 5120]"
  std::string ToString() const {
    std::string s = "[";
    for (int i = 0; i < rank_; ++i) absl::StrAppend(&s, i ? ", " : "", dims_[i]);
    return s + "]";
  }

 private:
  std::array<int64_t, 4> dims_ = {0, 0, 0, 0};
  int rank_ = 0;
};

namespace internal {

template <typename Void, typename Byte>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t row_stride = 0;  // elements between rows of dimension 0
  DeviceType device = DeviceType::kCpu;

  BasicTensorView() = default;
  BasicTensorView(Void* data_in, DType dtype_in, Shape shape_in,
                  DeviceType device_in = DeviceType::kCpu)
      : data(data_in), dtype(dtype_in), shape(shape_in), device(device_in) {
    row_stride = RowElements();
  }
  // A mutable view is usable where a constant one is asked for.
  template <typename OtherVoid, typename OtherByte>
  BasicTensorView(const BasicTensorView<OtherVoid, OtherByte>& other)  // NOLINT: implicit
      : data(other.data),
        dtype(other.dtype),
        shape(other.shape),
        row_stride(other.row_stride),
        device(other.device) {}

  // Elements of one row of dimension 0 (the product of the inner dimensions).
  int64_t RowElements() const {
    int64_t n = 1;
    for (int i = 1; i < shape.rank(); ++i) n *= shape[i];
    return n;
  }
  int64_t rows() const { return shape[0]; }
  bool contiguous() const { return row_stride == RowElements(); }
  int64_t bytes() const { return shape.num_elements() * SizeOf(dtype); }

  // Typed pointer to row r; the dtype must match.
  template <typename T>
  auto row(int64_t r) const {
    CHECK(DTypeOf<T>::value == dtype) << "view is " << Name(dtype) << " ";
    using Ptr = typename std::conditional<std::is_const<Void>::value, const T*, T*>::type;
    return static_cast<Ptr>(data) + r * row_stride;
  }
  // Rows [begin, begin + count) as a view.
  BasicTensorView Rows(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && count >= 0 && begin + count <= shape[0])
        << "rows " << begin << "+" << count << " of " << shape.ToString() << " ";
    BasicTensorView v = *this;
    v.data = static_cast<Byte*>(data) + begin * row_stride * SizeOf(dtype);
    Shape s;
    s.push_back(count);
    for (int i = 1; i < shape.rank(); ++i) s.push_back(shape[i]);
    v.shape = s;
    return v;
  }
  // Columns [begin, begin + count) of a rank-2 view; the row stride stays.
  BasicTensorView Columns(int64_t begin, int64_t count) const {
    CHECK_EQ(shape.rank(), 2);
    CHECK(begin >= 0 && count >= 0 && begin + count <= shape[1])
        << "columns " << begin << "+" << count << " of " << shape.ToString() << " ";
    BasicTensorView v = *this;
    v.data = static_cast<Byte*>(data) + begin * SizeOf(dtype);
    v.shape = Shape{shape[0], count};
    return v;
  }
  std::string ToString() const { return absl::StrCat(Name(dtype), shape.ToString()); }
};

}  // namespace internal

using TensorView = internal::BasicTensorView<void, uint8_t>;
using ConstTensorView = internal::BasicTensorView<const void, const uint8_t>;

}  // namespace lockstep
