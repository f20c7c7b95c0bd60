// Tests of Checkpoint: what is read, every error by code and message, and damaged files of all
// kinds.
#include "models/weights/checkpoint.h"

#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/weights/testing/safetensors_writer.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::MakeTempDir;
using testing::ReadFile;
using testing::SafetensorsBytes;
using testing::SafetensorsWriter;
using ::testing::StartsWith;
using testing::StatusIs;
using testing::WriteFile;

constexpr auto kDataLoss = absl::StatusCode::kDataLoss;

SafetensorsWriter SmallFile() {
  SafetensorsWriter writer;
  writer.AddF32("a", {2, 3}, {1, 2, 3, 4, 5, 6});
  writer.AddBF16("b", {3}, {0.5f, -1, 2});
  writer.AddF32("scalar", {}, {7});
  writer.AddFilled("empty", DType::kF32, {0, 4});
  writer.AddBytes("codes", DType::kE4M3, {1, 2}, {0x38, 0xb8});
  return writer;
}

// Opens a directory whose model.safetensors has these bytes.
absl::StatusOr<std::unique_ptr<Checkpoint>> OpenBytes(const std::string& bytes) {
  const std::string dir = MakeTempDir();
  WriteFile(dir + "/model.safetensors", bytes);
  return Checkpoint::Open(dir);
}

absl::StatusOr<std::unique_ptr<Checkpoint>> OpenHeader(const std::string& header,
                                                       size_t data_bytes) {
  return OpenBytes(SafetensorsBytes(header, std::string(data_bytes, '\0')));
}

void WriteIndex(const std::string& dir,
                const std::vector<std::pair<std::string, std::string>>& map) {
  nlohmann::json weight_map = nlohmann::json::object();
  for (const auto& item : map) weight_map[item.first] = item.second;
  WriteFile(dir + "/model.safetensors.index.json",
            nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
}

// a in shard 1, b in shard 2.
std::string TwoShards() {
  const std::string dir = MakeTempDir();
  SafetensorsWriter().AddF32("a", {1}, {1}).Write(dir + "/one.safetensors");
  SafetensorsWriter().AddF32("b", {1}, {2}).Write(dir + "/two.safetensors");
  WriteIndex(dir, {{"a", "one.safetensors"}, {"b", "two.safetensors"}});
  return dir;
}

TEST(CheckpointTest, ReadsASingleFile) {
  SafetensorsWriter writer = SmallFile();
  writer.header()["__metadata__"] = {{"format", "pt"}};
  const std::string dir = MakeTempDir();
  writer.Write(dir + "/model.safetensors");
  WriteFile(dir + "/golden.safetensors", "not looked at");
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(dir));
  EXPECT_EQ(checkpoint->tensors().size(), 5u);
  EXPECT_EQ(checkpoint->total_bytes(), 24 + 6 + 4 + 2);
  EXPECT_EQ(checkpoint->directory(), dir);
  ASSERT_OK_AND_ASSIGN(const TensorInfo* a, checkpoint->Get("a"));
  EXPECT_EQ(a->ToString(), "F32[2, 3]");
  EXPECT_EQ(a->file, "model.safetensors");
  EXPECT_EQ(a->num_elements(), 6);
  float values[6];
  std::memcpy(values, a->data, sizeof values);
  EXPECT_EQ(values[5], 6.0f);
  EXPECT_EQ(checkpoint->Find("scalar")->ToString(), "F32[]");
  EXPECT_EQ(checkpoint->Find("scalar")->num_elements(), 1);
  EXPECT_EQ(checkpoint->Find("empty")->bytes, 0);
  EXPECT_EQ(checkpoint->Find("codes")->data[1], 0xb8);
  EXPECT_EQ(checkpoint->Find("no such"), nullptr);
  EXPECT_THAT(checkpoint->Get("no such"),
              StatusIs(absl::StatusCode::kNotFound, AllOf(HasSubstr("no such"), HasSubstr(dir))));
}

TEST(CheckpointTest, ReadsShardsThroughTheIndex) {
  const std::string dir = TwoShards();
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::Open(dir));
  EXPECT_EQ(checkpoint->Find("a")->file, "one.safetensors");
  EXPECT_EQ(checkpoint->Find("b")->file, "two.safetensors");
}

TEST(CheckpointTest, OpensOneFileByPath) {
  const std::string dir = MakeTempDir();
  SmallFile().Write(dir + "/golden.safetensors");
  ASSERT_OK_AND_ASSIGN(const auto checkpoint, Checkpoint::OpenFile(dir + "/golden.safetensors"));
  EXPECT_EQ(checkpoint->tensors().size(), 5u);
  EXPECT_EQ(checkpoint->directory(), dir);
  EXPECT_THAT(Checkpoint::OpenFile(dir + "/none.safetensors"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none.safetensors")));
}

TEST(CheckpointTest, DigestTellsCheckpointsApart) {
  ASSERT_OK_AND_ASSIGN(const auto one, OpenBytes(SmallFile().Serialize()));
  ASSERT_OK_AND_ASSIGN(const auto same, OpenBytes(SmallFile().Serialize()));
  EXPECT_EQ(one->digest(), same->digest());
  ASSERT_OK_AND_ASSIGN(const auto name,
                       OpenBytes(SafetensorsWriter().AddF32("x", {2}, {1, 2}).Serialize()));
  ASSERT_OK_AND_ASSIGN(const auto other,
                       OpenBytes(SafetensorsWriter().AddF32("y", {2}, {1, 2}).Serialize()));
  ASSERT_OK_AND_ASSIGN(const auto shape,
                       OpenBytes(SafetensorsWriter().AddF32("x", {1, 2}, {1, 2}).Serialize()));
  EXPECT_NE(name->digest(), other->digest());
  EXPECT_NE(name->digest(), shape->digest());
}

TEST(CheckpointTest, MissingDirectoryOrFilesAreNotFound) {
  const std::string dir = MakeTempDir();
  EXPECT_THAT(Checkpoint::Open(dir + "/none"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no directory")));
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("neither model.safetensors nor")));
}

TEST(CheckpointTest, IndexErrors) {
  std::string dir = TwoShards();
  ASSERT_EQ(std::remove((dir + "/two.safetensors").c_str()), 0);
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_MISSING_SHARD"),
                                        HasSubstr("two.safetensors"), HasSubstr("tensor b"))));
  dir = TwoShards();
  WriteIndex(dir, {{"a", "one.safetensors"}, {"b", "two.safetensors"}, {"c", "two.safetensors"}});
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_INDEX_MISMATCH"),
                                        HasSubstr("tensor c in two.safetensors"))));
  WriteIndex(dir, {{"a", "two.safetensors"}, {"b", "one.safetensors"}});
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_INDEX_MISMATCH"),
                                        HasSubstr("it is in one.safetensors"))));
  SafetensorsWriter().AddF32("b", {1}, {2}).AddF32("x", {1}, {3}).Write(dir + "/two.safetensors");
  WriteIndex(dir, {{"a", "one.safetensors"}, {"b", "two.safetensors"}});
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_INDEX_MISMATCH"),
                                        HasSubstr("two.safetensors has tensor x"))));
  SafetensorsWriter().AddF32("a", {1}, {2}).AddF32("b", {1}, {3}).Write(dir + "/two.safetensors");
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_DUPLICATE_TENSOR"),
                                        HasSubstr("one.safetensors and in two.safetensors"))));
}

TEST(CheckpointTest, IndexThatIsNoIndex) {
  const std::string dir = TwoShards();
  const std::string path = dir + "/model.safetensors.index.json";
  const auto expect = [&](const std::string& text, const std::string& what) {
    WriteFile(path, text);
    EXPECT_THAT(Checkpoint::Open(dir),
                StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_INVALID"), HasSubstr(what))));
  };
  expect("{", "not valid JSON");
  expect("[]", "not a JSON object");
  expect("{}", "weight_map");
  expect(R"({"weight_map": {}})", "names no tensors");
  expect(R"({"weight_map": {"a": 1}})", "no file name");
  expect(R"({"weight_map": {"a": "../one.safetensors"}})", "not a file name");
  expect(R"({"weight_map": {"a": "/etc/passwd"}})", "not a file name");
  WriteFile(path, R"({"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}})");
  EXPECT_THAT(Checkpoint::Open(dir),
              StatusIs(kDataLoss, StartsWith("CHECKPOINT_DUPLICATE_TENSOR")));
}

TEST(CheckpointTest, TruncatedByOneByte) {
  std::string bytes = SmallFile().Serialize();
  bytes.pop_back();
  EXPECT_THAT(OpenBytes(bytes),
              StatusIs(kDataLoss, AllOf(StartsWith("CHECKPOINT_TRUNCATED: model.safetensors"),
                                        HasSubstr("1 bytes are missing"))));
}

TEST(CheckpointTest, HeaderErrors) {
  const struct {
    const char* header;
    size_t data;
    const char* prefix;
    const char* what;
  } kRows[] = {
      {"", 0, "CHECKPOINT_INVALID", "does not begin with {"},
      {"[]", 0, "CHECKPOINT_INVALID", "does not begin with {"},
      {"{", 0, "CHECKPOINT_INVALID", "not valid JSON"},
      {"{\"a\":\"\xff\"}", 0, "CHECKPOINT_INVALID", "not valid JSON"},
      {R"({"a":3})", 0, "CHECKPOINT_INVALID", "tensor a: not an object"},
      {R"({"__metadata__":3})", 0, "CHECKPOINT_INVALID", "__metadata__"},
      {R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4, "CHECKPOINT_INVALID", "\"dtype\""},
      {R"({"a":{"dtype":"C64","shape":[],"data_offsets":[0,8]}})", 8, "CHECKPOINT_INVALID",
       "tensor a: dtype \"C64\""},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4, "CHECKPOINT_INVALID", "\"shape\""},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4, "CHECKPOINT_INVALID",
       "integers"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4, "CHECKPOINT_INVALID",
       "integers"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", 4, "CHECKPOINT_INVALID",
       "not a range"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4, "CHECKPOINT_INVALID",
       "not a range"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]}})", 4,
       "CHECKPOINT_INVALID", "integers"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4, "CHECKPOINT_INVALID",
       "F32[2] takes 8 bytes, but data_offsets give it 4"},
      {R"({"a":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}})", 4,
       "CHECKPOINT_INVALID", "more than 2^63"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
       3, "CHECKPOINT_INVALID", "tensor b begins at 1 and overlaps tensor a"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
       R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
       5, "CHECKPOINT_INVALID", "hole of 1 bytes between tensor a and tensor b"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})", 3, "CHECKPOINT_INVALID",
       "hole of 1 bytes between the header"},
      {R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", 5, "CHECKPOINT_INVALID",
       "3 bytes belong to no tensor"},
      {R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 2, "CHECKPOINT_TRUNCATED",
       "7 bytes are missing"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
       R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, "CHECKPOINT_DUPLICATE_TENSOR", "\"a\" twice"},
  };
  for (const auto& row : kRows) {
    EXPECT_THAT(OpenHeader(row.header, row.data),
                StatusIs(kDataLoss, AllOf(StartsWith(row.prefix), HasSubstr("model.safetensors"),
                                          HasSubstr(row.what))))
        << row.header;
  }
  std::string deep = "{\"a\":";
  for (int i = 0; i < 100000; ++i) deep += "[";
  for (int i = 0; i < 100000; ++i) deep += "]";
  EXPECT_THAT(OpenHeader(deep + "}", 0), StatusIs(kDataLoss, HasSubstr("nests deeper")));
}

TEST(CheckpointTest, HeaderLengthLimits) {
  const auto with_length = [](uint64_t length) {
    std::string bytes(8, '\0');
    std::memcpy(&bytes[0], &length, 8);
    return bytes + "{}";
  };
  EXPECT_THAT(OpenBytes(with_length(2)), IsOk());
  EXPECT_THAT(OpenBytes(with_length(3)), StatusIs(kDataLoss, StartsWith("CHECKPOINT_TRUNCATED")));
  EXPECT_THAT(OpenBytes(with_length(100'000'000)),
              StatusIs(kDataLoss, StartsWith("CHECKPOINT_TRUNCATED")));
  for (const uint64_t length : {uint64_t{100'000'001}, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_THAT(OpenBytes(with_length(length)),
                StatusIs(kDataLoss,
                         AllOf(StartsWith("CHECKPOINT_INVALID"), HasSubstr("at most 100000000"))));
  }
}

// Reads every byte of every view: a view out of bounds would fault or trip a sanitizer.
uint64_t Touch(const Checkpoint& checkpoint) {
  uint64_t sum = 0;
  for (const auto& item : checkpoint.tensors()) {
    for (int64_t i = 0; i < item.second.bytes; ++i) sum += item.second.data[i];
  }
  return sum;
}

TEST(CheckpointTest, TruncationAtEveryByteIsACleanError) {
  const std::string dir = MakeTempDir();
  const std::string path = dir + "/model.safetensors";
  const std::string bytes = SmallFile().Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    WriteFile(path, bytes.substr(0, size));
    EXPECT_THAT(Checkpoint::Open(dir), StatusIs(kDataLoss, StartsWith("CHECKPOINT_TRUNCATED")))
        << size;
  }
}

TEST(CheckpointTest, AnyFlippedHeaderByteIsReadOrRefused) {
  const std::string dir = MakeTempDir();
  const std::string path = dir + "/model.safetensors";
  const std::string bytes = SmallFile().Serialize();
  const size_t header_end = bytes.size() - SmallFile().data().size();
  for (size_t i = 0; i < header_end; ++i) {
    for (const int flip : {0x01, 0x02, 0x10, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      WriteFile(path, damaged);
      const auto checkpoint = Checkpoint::Open(dir);
      if (checkpoint.ok()) {
        Touch(**checkpoint);
      } else {
        EXPECT_THAT(checkpoint, StatusIs(kDataLoss, StartsWith("CHECKPOINT_"))) << i;
      }
    }
  }
}

TEST(CheckpointTest, AnyFlippedIndexByteIsReadOrRefused) {
  const std::string dir = TwoShards();
  const std::string path = dir + "/model.safetensors.index.json";
  const std::string bytes = ReadFile(path);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (const int flip : {0x01, 0x10, 0x80}) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ flip);
      WriteFile(path, damaged);
      const auto checkpoint = Checkpoint::Open(dir);
      if (checkpoint.ok()) {
        Touch(**checkpoint);
      } else {
        EXPECT_THAT(checkpoint, StatusIs(kDataLoss, StartsWith("CHECKPOINT_"))) << i;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep
