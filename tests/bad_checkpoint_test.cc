// Broken checkpoints: each is refused by real workers with the code and the words that say what is
// wrong, and the same workers then load a good one.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/group/worker_group.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "nlohmann/json.hpp"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

using ::testing::HasSubstr;

constexpr char kGood[] = "qwen3_5-ct-nvfp4-fp8";

// A safetensors file taken apart: header and data can be changed and written back.
struct Tensors {
  nlohmann::json header;
  std::string data;

  static Tensors Read(const std::string& path) {
    const std::string bytes = ReadFile(path);
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    return {nlohmann::json::parse(bytes.substr(8, length)), bytes.substr(8 + length)};
  }
  void Write(const std::string& path) const {
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), 8);
    file << text << data;
  }
  char* At(const std::string& name) { return &data[header[name]["data_offsets"][0].get<size_t>()]; }
};

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Rewrites model.safetensors of `folder`.
void Change(const std::string& folder, const std::function<void(Tensors*)>& change) {
  Tensors tensors = Tensors::Read(folder + "/model.safetensors");
  change(&tensors);
  tensors.Write(folder + "/model.safetensors");
}

void ChangeConfig(const std::string& folder, const std::function<void(nlohmann::json*)>& change) {
  nlohmann::json config = nlohmann::json::parse(ReadFile(folder + "/config.json"));
  change(&config);
  WriteFile(folder + "/config.json", config.dump());
}

// Splits the one file into two shards with an index.
void Shard(const std::string& folder) {
  const Tensors all = Tensors::Read(folder + "/model.safetensors");
  nlohmann::json index = {{"metadata", nlohmann::json::object()},
                          {"weight_map", nlohmann::json::object()}};
  Tensors parts[2];
  int i = 0;
  for (const auto& item : all.header.items()) {
    if (item.key() == "__metadata__") continue;
    Tensors& part = parts[i++ % 2];
    const size_t begin = item.value()["data_offsets"][0], end = item.value()["data_offsets"][1];
    nlohmann::json entry = item.value();
    entry["data_offsets"] = {part.data.size(), part.data.size() + end - begin};
    part.data += all.data.substr(begin, end - begin);
    part.header[item.key()] = entry;
    index["weight_map"][item.key()] =
        absl::StrCat("model-0000", 2 - i % 2, "-of-00002.safetensors");
  }
  parts[0].Write(folder + "/model-00001-of-00002.safetensors");
  parts[1].Write(folder + "/model-00002-of-00002.safetensors");
  WriteFile(folder + "/model.safetensors.index.json", index.dump());
  std::filesystem::remove(folder + "/model.safetensors");
}

void ChangeIndex(const std::string& folder, const std::function<void(nlohmann::json*)>& change) {
  const std::string path = folder + "/model.safetensors.index.json";
  nlohmann::json index = nlohmann::json::parse(ReadFile(path));
  change(&index["weight_map"]);
  WriteFile(path, index.dump());
}

struct Case {
  const char* name;
  std::function<void(const std::string& folder)> damage;
  absl::StatusCode code;
  std::vector<std::string> words;
};

std::vector<Case> Cases() {
  const auto kDataLoss = absl::StatusCode::kDataLoss;
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  return {
      {"TruncatedByOneByte",
       [](const std::string& f) {
         const std::string path = f + "/model.safetensors";
         std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
       },
       kDataLoss,
       {"CHECKPOINT_TRUNCATED", "model.safetensors", "1 byte"}},
      {"MissingShard",
       [](const std::string& f) {
         Shard(f);
         std::filesystem::remove(f + "/model-00002-of-00002.safetensors");
       },
       kDataLoss,
       {"CHECKPOINT_MISSING_SHARD", "model-00002-of-00002.safetensors"}},
      {"IndexNamesAMissingFile",
       [](const std::string& f) {
         Shard(f);
         ChangeIndex(f,
                     [](nlohmann::json* map) { map->begin().value() = "elsewhere.safetensors"; });
       },
       kDataLoss,
       {"elsewhere.safetensors"}},
      {"IndexLeavesOutATensor",
       [](const std::string& f) {
         Shard(f);
         ChangeIndex(f, [](nlohmann::json* map) { map->erase("lm_head.weight"); });
       },
       kDataLoss,
       {"CHECKPOINT_INDEX_MISMATCH", "lm_head.weight"}},
      {"OverlappingTensors",
       [](const std::string& f) {
         Change(f, [](Tensors* t) {
           auto& a = t->header["model.layers.0.linear_attn.A_log"]["data_offsets"];
           t->header["model.layers.0.linear_attn.dt_bias"]["data_offsets"] = a;
         });
       },
       kDataLoss,
       {"CHECKPOINT_", "overlap"}},
      {"NanScale",
       [](const std::string& f) {
         // In the shards of both ranks.
         Change(f, [](Tensors* t) {
           const std::string name = "model.layers.0.mlp.gate_proj.weight_scale";
           *t->At(name) = 0x7f;
           t->data[t->header[name]["data_offsets"][1].get<size_t>() - 1] = 0x7f;
         });
       },
       kDataLoss,
       {"CHECKPOINT_INVALID", "model.layers.0.mlp.gate_proj.weight_scale", "NaN"}},
      {"UnknownTensor",
       [](const std::string& f) {
         Change(f, [](Tensors* t) {
           t->header["model.layers.0.surprise"] = {
               {"dtype", "U8"},
               {"shape", {1}},
               {"data_offsets", {t->data.size(), t->data.size() + 1}}};
           t->data.push_back('x');
         });
       },
       kInvalid,
       {"model.layers.0.surprise"}},
      {"MissingTensor",
       [](const std::string& f) {
         Change(f, [](Tensors* t) {
           t->header["renamed"] = t->header["model.norm.weight"];
           t->header.erase("model.norm.weight");
         });
       },
       absl::StatusCode::kNotFound,
       {"model.norm.weight"}},
      {"UnsupportedQuantization",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) {
           (*c)["quantization_config"] = {{"quant_method", "awq"}, {"bits", 4}};
         });
       },
       absl::StatusCode::kUnimplemented,
       {"awq"}},
      {"UnsupportedArchitecture",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) { (*c)["model_type"] = "mystery"; });
       },
       absl::StatusCode::kUnimplemented,
       {"mystery", "qwen3_5"}},
      {"VocabularyMismatch",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) { (*c)["vocab_size"] = 321; });
       },
       kInvalid,
       {"321", "320"}},
      {"ConfigValueOfAnotherType",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) { (*c)["rms_norm_eps"] = "small"; });
       },
       kInvalid,
       {"rms_norm_eps", "small", "a number"}},
      {"NegativeEpsilon",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) { (*c)["rms_norm_eps"] = -1; });
       },
       kInvalid,
       {"rms_norm_eps is -1"}},
      {"ZeroRopeTheta",
       [](const std::string& f) {
         ChangeConfig(f, [](nlohmann::json* c) { (*c)["rope_parameters"]["rope_theta"] = 0; });
       },
       kInvalid,
       {"rope_theta is 0"}},
      {"ConfigIsNoJson",
       [](const std::string& f) { WriteFile(f + "/config.json", "{\"model_type\": "); },
       kDataLoss,
       {"config.json"}},
      {"NoConfig",
       [](const std::string& f) { std::filesystem::remove(f + "/config.json"); },
       absl::StatusCode::kNotFound,
       {"config.json"}},
      {"NoFolder",
       [](const std::string& f) { std::filesystem::remove_all(f); },
       absl::StatusCode::kNotFound,
       {}},
  };
}

class BadCheckpointTest : public ::testing::TestWithParam<Case> {};

absl::StatusOr<std::vector<worker::v1::LoadModelResult>> Load(const Workers& workers,
                                                              const std::string& folder,
                                                              uint64_t term) {
  WorkerGroupOptions options;
  options.addresses = workers.addresses;
  options.model_path = folder;
  return WorkerGroup(options).Load(term, nullptr);
}

TEST_P(BadCheckpointTest, IsRefusedAndTheWorkersLoadAGoodOne) {
  const Case& c = GetParam();
  const std::string folder = TempPath("checkpoint");
  std::filesystem::copy(TestModel(kGood), folder, std::filesystem::copy_options::recursive);
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_all);
  }
  c.damage(folder);
  ASSERT_OK_AND_ASSIGN(const Workers workers, Workers::Start(2));
  const auto loaded = Load(workers, folder, 1);
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.status().code(), c.code) << loaded.status().ToString();
  EXPECT_THAT(std::string(loaded.status().message()), HasSubstr("rank"));
  for (const std::string& word : c.words) {
    EXPECT_THAT(std::string(loaded.status().message()), HasSubstr(word));
  }
  EXPECT_OK(Load(workers, TestModel(kGood), 2));
}

INSTANTIATE_TEST_SUITE_P(All, BadCheckpointTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(GoodCheckpoint, InTwoShardsIsTheSameModel) {
  const std::string folder = TempPath("sharded");
  std::filesystem::copy(TestModel(kGood), folder, std::filesystem::copy_options::recursive);
  Shard(folder);
  ASSERT_OK_AND_ASSIGN(const Workers workers, Workers::Start(2));
  ASSERT_OK_AND_ASSIGN(const auto sharded, Load(workers, folder, 1));
  ASSERT_OK_AND_ASSIGN(const Workers others, Workers::Start(2));
  ASSERT_OK_AND_ASSIGN(const auto single, Load(others, TestModel(kGood), 1));
  ASSERT_EQ(sharded.size(), single.size());
  for (size_t r = 0; r < single.size(); ++r) {
    EXPECT_EQ(sharded[r].resident_bytes(), single[r].resident_bytes());
    EXPECT_EQ(sharded[r].checkpoint_bytes(), single[r].checkpoint_bytes());
  }
}

}  // namespace
}  // namespace testing
}  // namespace lockstep
