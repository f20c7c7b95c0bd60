// Every FP8 linear of the reference outputs (`w8a8.linear.{module}.*`): from the stored input the
// codes and scales come out bit-equal and the output within 1e-5 of its largest value, at worlds 1,
// 2 and 4.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/comm/tree_sum.h"
#include "models/layers/linear.h"
#include "models/quant/testing/linear_test_util.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace {

using ::lockstep::testing::TestContext;

nlohmann::json ReadJson(const std::string& path) {
  std::ifstream file(path);
  return nlohmann::json::parse(file);
}

bool IsRowParallel(const std::string& module) {
  return absl::EndsWith(module, "o_proj") || absl::EndsWith(module, "out_proj") ||
         absl::EndsWith(module, "down_proj");
}

// A stored tensor [T, columns], copied to aligned memory.
template <typename T>
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<T> values;

  Matrix(int64_t rows_in, int64_t columns_in)
      : rows(rows_in), columns(columns_in), values(rows_in * columns_in) {}
  explicit Matrix(const TensorInfo& t) : Matrix(t.shape[0], t.shape[1]) {
    std::memcpy(values.data(), t.data, t.bytes);
  }
  void SetColumns(int64_t begin, const Matrix& part) {
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(&part.values[r * part.columns], part.columns, &values[r * columns + begin]);
    }
  }
};

// The stored scales, one row per token: static ones are stored once for all tokens, [scales].
Matrix<float> StoredScales(const TensorInfo& t, int64_t tokens) {
  if (t.shape.size() == 2) return Matrix<float>(t);
  Matrix<float> m(tokens, t.shape[0]);
  for (int64_t r = 0; r < tokens; ++r) std::memcpy(&m.values[r * m.columns], t.data, t.bytes);
  return m;
}

template <typename T>
Matrix<T> Copy(TensorView view) {
  Matrix<T> m(view.shape[0], view.shape[1]);
  for (int64_t r = 0; r < m.rows; ++r) {
    std::memcpy(&m.values[r * m.columns], view.row<T>(r), m.columns * sizeof(T));
  }
  return m;
}

class LinearGoldenTest : public ::testing::TestWithParam<std::string> {
 protected:
  // One linear at one world against its stored tensors.
  void Check(const Checkpoint& checkpoint, const SchemeResolver& resolver, const Checkpoint& golden,
             const std::string& module, int world) {
    SCOPED_TRACE(absl::StrCat(module, " world ", world));
    const std::string prefix = absl::StrCat("w8a8.linear.", module, ".");
    ASSERT_OK_AND_ASSIGN(const TensorInfo* input_info, golden.Get(prefix + "input"));
    ASSERT_OK_AND_ASSIGN(const TensorInfo* codes_info, golden.Get(prefix + "quantized"));
    ASSERT_OK_AND_ASSIGN(const TensorInfo* scales_info, golden.Get(prefix + "scale"));
    ASSERT_OK_AND_ASSIGN(const TensorInfo* output_info, golden.Get(prefix + "output"));
    Matrix<float> x(*input_info);
    const Matrix<float> expected(*output_info);
    const int64_t n = expected.columns, k = x.columns;
    const bool row_parallel = IsRowParallel(module);

    Matrix<float> out(expected.rows, n);
    Matrix<uint8_t> codes(x.rows, k);
    const Matrix<float> expected_scales = StoredScales(*scales_info, x.rows);
    Matrix<float> scales(x.rows, expected_scales.columns);
    std::vector<Matrix<float>> parts;
    for (int rank = 0; rank < world; ++rank) {
      WeightStore store(&checkpoint, DeviceType::kCpu, rank, world, nullptr, nullptr);
      LinearLoader loader;
      loader.store = &store;
      loader.resolver = &resolver;
      loader.activation_quant = ActivationQuant::kCheckpoint;
      absl::StatusOr<Linear> linear =
          row_parallel
              ? Linear::RowParallel(loader, module, "test", n, k)
              : Linear::ColumnParallel(loader, module, "test", n, k, ShardSpec::Split(n / 8, 8));
      ASSERT_OK(linear.status());
      const Range columns = linear->resident().shard().columns;
      Workspace::Scope scope(context_.workspace());
      LinearInput input(TensorView(x.values.data(), DType::kF32, {x.rows, k})
                            .Columns(columns.begin, columns.size));
      Matrix<float> part(x.rows, linear->local_n());
      const TensorView part_view(part.values.data(), DType::kF32, {part.rows, part.columns});
      if (row_parallel) {
        ASSERT_OK(linear->ApplyReduce(context_.ctx(), nullptr, &input, part_view));
      } else {
        ASSERT_OK(linear->Apply(context_.ctx(), &input, part_view));
        out.SetColumns(rank * part.columns, part);
      }
      parts.push_back(part);
      ASSERT_OK_AND_ASSIGN(const LinearInput::Quantized q,
                           linear->resident().QuantizeInput(context_.ctx(), &input));
      codes.SetColumns(columns.begin, Copy<uint8_t>(q.codes));
      scales.SetColumns(row_parallel ? rank * q.scales.shape[1] : 0, Copy<float>(q.scales));
      const WeightStore::Bytes bytes = store.total();
      EXPECT_LE(bytes.resident, 1.02 * bytes.checkpoint);
    }
    if (row_parallel) {
      std::vector<const float*> pointers;
      for (const auto& part : parts) pointers.push_back(part.values.data());
      TreeSum(nullptr, pointers, x.rows * n, out.values.data());
    }

    EXPECT_EQ(0, std::memcmp(codes.values.data(), codes_info->data, codes_info->bytes)) << "codes";
    EXPECT_EQ(scales.values, expected_scales.values);
    float largest = 0.0f, error = 0.0f;
    for (size_t i = 0; i < expected.values.size(); ++i) {
      largest = std::max(largest, std::fabs(expected.values[i]));
      error = std::max(error, std::fabs(out.values[i] - expected.values[i]));
    }
    EXPECT_LE(error, 1e-5f * largest);
    if (world == 1) {
      world_one_ = out.values;
    } else {
      EXPECT_EQ(0, std::memcmp(out.values.data(), world_one_.data(), world_one_.size() * 4));
    }
  }

  TestContext context_;
  std::vector<float> world_one_;
};

TEST_P(LinearGoldenTest, CodesScalesAndOutputs) {
  const std::string folder = "tests/testdata/" + GetParam();
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(folder));
  ASSERT_OK_AND_ASSIGN(const auto golden, Checkpoint::OpenFile(folder + "/golden.safetensors"));
  ASSERT_OK_AND_ASSIGN(const auto resolver,
                       SchemeResolver::Create(ReadJson(folder + "/config.json"), *checkpoint));
  int linears = 0;
  const std::string prefix = "w8a8.linear.", suffix = ".input";
  for (const auto& item : golden->tensors()) {
    const std::string& name = item.first;
    if (!absl::StartsWith(name, prefix) || !absl::EndsWith(name, suffix)) continue;
    const std::string module =
        name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    for (int world : {1, 2, 4}) Check(*checkpoint, *resolver, *golden, module, world);
    ++linears;
  }
  RecordProperty("linears", linears);
  EXPECT_GT(linears, 0);
}

INSTANTIATE_TEST_SUITE_P(Folders, LinearGoldenTest,
                         ::testing::Values("qwen3_5-ct-fp8-dynamic", "qwen3_5-ct-nvfp4-fp8",
                                           "qwen3_5-fp8-block", "qwen3_5-modelopt-mixed",
                                           "qwen3_5-trained-ct-nvfp4-fp8"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lockstep
