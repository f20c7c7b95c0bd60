// Test helper: writes safetensors files, indexes and whole checkpoint folders. Tensors are laid out
// in the order of Add, without holes, so that a test knows every offset.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/base/check.h"
#include "kernels/base/dtype.h"
#include "kernels/base/float_types.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace testing {

inline void WriteFile(const std::string& path, const std::string& content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  out.close();
  CHECK(out.good()) << path << " cannot be written ";
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK(in.good()) << path << " cannot be read ";
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

// A new empty directory below the test's temporary directory.
inline std::string MakeTempDir() {
  std::string path = ::testing::TempDir() + "/checkpoint_XXXXXX";
  CHECK(mkdtemp(&path[0]) != nullptr) << path << " cannot be made ";
  return path;
}

// 8 bytes of length, `header` and `data` as one file.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  std::string out;
  for (int i = 0; i < 8; ++i) out.push_back(static_cast<char>((length >> (8 * i)) & 0xff));
  return out + header + data;
}

class SafetensorsWriter {
 public:
  // `data` as stored, little endian.
  SafetensorsWriter& Add(const std::string& name, DType dtype, std::vector<int64_t> shape,
                         const std::string& data) {
    const int64_t begin = static_cast<int64_t>(data_.size());
    data_ += data;
    header_[name] = {{"dtype", std::string(Name(dtype))},
                     {"shape", std::move(shape)},
                     {"data_offsets", {begin, static_cast<int64_t>(data_.size())}}};
    names_.push_back(name);
    return *this;
  }
  // Every byte is `fill`.
  SafetensorsWriter& AddFilled(const std::string& name, DType dtype,
                               const std::vector<int64_t>& shape, uint8_t fill = 0) {
    int64_t bytes = SizeOf(dtype);
    for (int64_t d : shape) bytes *= d;
    return Add(name, dtype, shape,
               std::string(static_cast<size_t>(bytes), static_cast<char>(fill)));
  }
  SafetensorsWriter& AddF32(const std::string& name, const std::vector<int64_t>& shape,
                            const std::vector<float>& values) {
    return Add(name, DType::kF32, shape, Raw(values.data(), values.size() * sizeof(float)));
  }
  SafetensorsWriter& AddBF16(const std::string& name, const std::vector<int64_t>& shape,
                             const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (float v : values) bits.push_back(ToBF16(v).bits);
    return Add(name, DType::kBF16, shape, Raw(bits.data(), bits.size() * sizeof(uint16_t)));
  }
  SafetensorsWriter& AddBytes(const std::string& name, DType dtype,
                              const std::vector<int64_t>& shape,
                              const std::vector<uint8_t>& bytes) {
    return Add(name, dtype, shape, Raw(bytes.data(), bytes.size()));
  }

  std::string Serialize() const { return SafetensorsBytes(header_.dump(), data_); }
  void Write(const std::string& path) const { WriteFile(path, Serialize()); }
  nlohmann::json& header() { return header_; }
  const std::string& data() const { return data_; }
  const std::vector<std::string>& names() const { return names_; }

 private:
  static std::string Raw(const void* data, size_t bytes) {
    std::string out(bytes, '\0');
    if (bytes > 0) std::memcpy(&out[0], data, bytes);
    return out;
  }

  nlohmann::json header_ = nlohmann::json::object();
  std::string data_;
  std::vector<std::string> names_;
};

}  // namespace testing
}  // namespace lockstep
