// Tests of the tokenizer: ids of the reference implementation, the goldens' prompts, broken files.
#include "models/tokenizer/tokenizer.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "models/tokenizer/normalizer.h"
#include "nlohmann/json.hpp"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

constexpr char kModel[] = "tests/testdata/qwen3_5-trained-ct-nvfp4-fp8";

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream contents;
  contents << in.rdbuf();
  return contents.str();
}

const Json& ModelFile() {
  static const Json file = Json::parse(ReadFile(absl::StrCat(kModel, "/tokenizer.json")));
  return file;
}

// A directory of this test with the given files.
std::string MakeDirectory(const std::string& tokenizer, const std::string& config = "") {
  static int count = 0;
  const std::string directory = absl::StrCat(::testing::TempDir(), "/tokenizer", count++);
  std::filesystem::create_directories(directory);
  std::ofstream(directory + "/tokenizer.json") << tokenizer;
  if (!config.empty()) {
    std::ofstream(directory + "/tokenizer_config.json") << config;
  }
  return directory;
}

// The model's file with members replaced; keys are JSON pointers.
Json Changed(const Json& changes) {
  Json file = ModelFile();
  for (const auto& [pointer, value] : changes.items()) {
    file[Json::json_pointer(pointer)] = value;
  }
  return file;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadChanged(const Json& changes,
                                                       const std::string& config = "") {
  return Tokenizer::Load(MakeDirectory(Changed(changes).dump(), config));
}

std::unique_ptr<Tokenizer> LoadModel() {
  auto tokenizer = Tokenizer::Load(kModel);
  EXPECT_THAT(tokenizer, IsOk());
  return *std::move(tokenizer);
}

// One int32 tensor of a safetensors file.
std::vector<int32_t> ReadIds(const std::string& file, const std::string& name) {
  uint64_t header_size = 0;
  std::memcpy(&header_size, file.data(), sizeof(header_size));
  const Json header = Json::parse(file.substr(8, header_size));
  const auto offsets = header.at(name).at("data_offsets").get<std::vector<size_t>>();
  std::vector<int32_t> ids((offsets[1] - offsets[0]) / 4);
  std::memcpy(ids.data(), file.data() + 8 + header_size + offsets[0], ids.size() * 4);
  return ids;
}

double SecondsToEncode(const Tokenizer& tokenizer, const std::string& text) {
  const auto start = std::chrono::steady_clock::now();
  const auto ids = tokenizer.Encode(text);
  EXPECT_THAT(ids, IsOk());
  EXPECT_EQ(tokenizer.DecodeBytes(*ids, false), text);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TEST(TokenizerTest, GivesTheIdsOfTheReference) {
  const Json vectors = Json::parse(ReadFile("models/tokenizer/testdata/vectors.json"));
  ASSERT_GE(vectors.size(), 8u);
  for (const Json& variant : vectors) {
    SCOPED_TRACE(variant.at("name").get<std::string>());
    ASSERT_OK_AND_ASSIGN(const auto tokenizer, LoadChanged(variant.at("changes")));
    for (const Json& example : variant.at("cases")) {
      const std::string text = example.at("text").get<std::string>();
      ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer->Encode(text));
      EXPECT_EQ(ids, example.at("ids").get<std::vector<int32_t>>()) << text;
    }
  }
}

TEST(TokenizerTest, GoldenPromptsRoundTrip) {
  const auto tokenizer = LoadModel();
  const std::string golden = ReadFile(absl::StrCat(kModel, "/golden.safetensors"));
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 4; ++i) {
    prompts.push_back(ReadIds(golden, absl::StrCat("weight_only.prompt", i, ".ids")));
    const std::string text = tokenizer->DecodeBytes(prompts.back(), false);
    EXPECT_TRUE(IsValidUtf8(text));
    ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer->Encode(text));
    EXPECT_EQ(ids, prompts.back()) << text;
  }
  ASSERT_OK_AND_ASSIGN(const auto capital, tokenizer->Encode("The capital of France is"));
  EXPECT_THAT(prompts, ::testing::Contains(capital));
}

TEST(TokenizerTest, DecodedTextIsTheNormalizedText) {
  const auto tokenizer = LoadModel();
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) {
      uint32_t c = random() % (round % 2 == 0 ? 0x3000 : 0x110000);
      AppendUtf8(c >= 0xD800 && c < 0xE000 ? 0xFFFD : c, &text);
    }
    ASSERT_OK_AND_ASSIGN(const auto ids, tokenizer->Encode(text));
    ASSERT_EQ(tokenizer->DecodeBytes(ids, false), NormalizeNfc(text));
  }
}

TEST(TokenizerTest, SpecialTokens) {
  const auto tokenizer = LoadModel();
  EXPECT_EQ(tokenizer->size(), 4096);
  EXPECT_EQ(tokenizer->FindToken("<|im_end|>"), 4095);
  EXPECT_EQ(tokenizer->FindToken("no such token"), -1);
  EXPECT_GE(tokenizer->FindToken(" the"), 0);
  EXPECT_TRUE(tokenizer->IsSpecial(4093));
  EXPECT_FALSE(tokenizer->IsSpecial(0));
  EXPECT_FALSE(tokenizer->IsSpecial(-1));
  EXPECT_EQ(tokenizer->TokenBytes(4094, true), "");
  EXPECT_EQ(tokenizer->TokenBytes(4094, false), "<|im_start|>");
  EXPECT_EQ(tokenizer->TokenBytes(4096, false), "");
  EXPECT_EQ(tokenizer->TokenBytes(-1, false), "");
  EXPECT_EQ(tokenizer->eos_id(), -1);
  ASSERT_OK_AND_ASSIGN(const auto parsed, tokenizer->Encode("a<|im_end|>"));
  EXPECT_THAT(parsed, ElementsAre(tokenizer->FindToken("a"), 4095));
  ASSERT_OK_AND_ASSIGN(const auto plain, tokenizer->Encode("a<|im_end|>", false));
  EXPECT_GT(plain.size(), 4u);
  EXPECT_EQ(tokenizer->DecodeBytes(plain, true), "a<|im_end|>");
}

TEST(TokenizerTest, OrdinaryAddedTokensAreText) {
  Json added = ModelFile().at("added_tokens");
  added.push_back({{"id", 5000}, {"content", "<think>"}, {"special", false}});
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, LoadChanged({{"/added_tokens", added}}));
  EXPECT_EQ(tokenizer->size(), 5001);
  EXPECT_EQ(tokenizer->TokenBytes(5000, true), "<think>");
  EXPECT_EQ(tokenizer->TokenBytes(4500, true), "");
}

TEST(TokenizerTest, MergesMayBeStrings) {
  Json merges = Json::array();
  for (const Json& merge : ModelFile().at("model").at("merges")) {
    merges.push_back(absl::StrCat(merge[0].get<std::string>(), " ", merge[1].get<std::string>()));
  }
  ASSERT_OK_AND_ASSIGN(const auto tokenizer, LoadChanged({{"/model/merges", merges}}));
  const std::string text = "The capital of France is Paris.\n";
  EXPECT_EQ(*tokenizer->Encode(text), *LoadModel()->Encode(text));
}

TEST(TokenizerTest, RefusesTextThatIsNotUtf8) {
  EXPECT_THAT(LoadModel()->Encode("ab\xC3("),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("at byte 2 of 4")));
}

TEST(TokenizerTest, LongTextsAreQuick) {
  const auto tokenizer = LoadModel();
  constexpr size_t kSize = 1 << 20;
  constexpr double kSeconds = 20;  // a quadratic algorithm needs hours
  EXPECT_LT(SecondsToEncode(*tokenizer, std::string(kSize, 'a')), kSeconds);
  EXPECT_LT(SecondsToEncode(*tokenizer, std::string(kSize, ' ')), kSeconds);
  EXPECT_LT(SecondsToEncode(*tokenizer, std::string(kSize, '\n')), kSeconds);
  EXPECT_LT(SecondsToEncode(*tokenizer, std::string(kSize, ' ') + "x"), kSeconds);
  std::string mixed;
  while (mixed.size() < kSize) {
    mixed += "the \t\xE6\x97\xA5!'s<|im";
  }
  EXPECT_LT(SecondsToEncode(*tokenizer, mixed), kSeconds);
}

TEST(TokenizerTest, ConfigGivesEosAndPattern) {
  ASSERT_OK_AND_ASSIGN(const auto named, LoadChanged({}, R"({"eos_token": "<|im_end|>"})"));
  EXPECT_EQ(named->eos_id(), 4095);
  ASSERT_OK_AND_ASSIGN(const auto object,
                       LoadChanged({}, R"({"eos_token": {"content": "<|endoftext|>"}})"));
  EXPECT_EQ(object->eos_id(), 4093);
  ASSERT_OK_AND_ASSIGN(const auto unknown, LoadChanged({}, R"({"eos_token": "</none>"})"));
  EXPECT_EQ(unknown->eos_id(), -1);
  ASSERT_OK_AND_ASSIGN(const auto pattern, LoadChanged({}, R"({"pretokenize_regex": "."})"));
  ASSERT_OK_AND_ASSIGN(const auto ids, pattern->Encode("the"));
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_THAT(LoadChanged({}, "["),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("tokenizer_config.json is not")));
}

TEST(TokenizerTest, MissingAndBrokenFiles) {
  EXPECT_THAT(Tokenizer::Load("no/such/place"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tokenizer.json in")));
  const auto data_loss = [](const std::string& file, const std::string& message) {
    EXPECT_THAT(Tokenizer::Load(MakeDirectory(file)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(message)));
  };
  data_loss("", "cannot be read or is empty");
  data_loss("{", "not a JSON object");
  data_loss(std::string(100000, '['), "not a JSON object");
  data_loss("{}", "no \"vocab\" object");
  data_loss(Changed({{"/model/vocab/x!", 1.5}}).dump(), "is 1.5, expected a 32-bit integer");
  data_loss(Changed({{"/model/vocab/x!", 1LL << 40}}).dump(), "expected a 32-bit integer");
  data_loss(Changed({{"/model/vocab/x!", -1}}).dump(), "has id -1; expected 0 to");
  data_loss(Changed({{"/model/vocab/x!", 1}}).dump(), "have the id 1");
  data_loss(Changed({{"/model/merges/0", "a b c"}}).dump(), "is not two tokens");
  data_loss(Changed({{"/model/merges/0", {"zq", "qz"}}}).dump(), "lacks its left part");
  data_loss(Changed({{"/model/ignore_merges", 3}}).dump(), "\"ignore_merges\" is number");
  data_loss(Changed({{"/added_tokens/0/id", 5}}).dump(), "of another vocabulary token");
  data_loss(Changed({{"/added_tokens/0/id", 1 << 30}}).dump(), "has id 1073741824; expected");
  data_loss(Changed({{"/added_tokens/0/content", ""}}).dump(), "lacks an id or its content");
  data_loss(Changed({{"/added_tokens/1/id", 4093}}).dump(), "is there twice");
  data_loss(Changed({{"/added_tokens", 1}}).dump(), "is not an array");
  data_loss(Changed({{"/pre_tokenizer/pretokenizers/0/pattern", 1}}).dump(), "no Regex or String");
}

TEST(TokenizerTest, NamesWhatIsNotSupported) {
  const auto refused = [](const Json& changes, const std::string& message) {
    EXPECT_THAT(LoadChanged(changes),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(message)));
  };
  refused({{"/normalizer/type", "NFKC"}}, "normalizer NFKC");
  refused({{"/normalizer", 1}}, "normalizer a number without a type");
  refused({{"/pre_tokenizer", {{"type", "Metaspace"}}}}, "pre_tokenizer Metaspace");
  refused({{"/pre_tokenizer", nullptr}}, "pre_tokenizer a null without a type");
  refused({{"/pre_tokenizer/pretokenizers/0/behavior", "MergedWithNext"}}, "\"MergedWithNext\"");
  refused({{"/pre_tokenizer/pretokenizers/0/pattern/Regex", "(a"}}, "does not compile");
  refused({{"/pre_tokenizer/pretokenizers/1/type", "Digits"}}, "without ByteLevel");
  refused({{"/pre_tokenizer/pretokenizers/0/type", "ByteLevel"}}, "ByteLevel after ByteLevel");
  refused({{"/model/type", "Unigram"}}, "model Unigram");
  refused({{"/model/byte_fallback", true}}, "model.byte_fallback");
  refused({{"/model/dropout", 0.1}}, "model.dropout 0.1");
  refused({{"/model/continuing_subword_prefix", "##"}}, "continuing_subword_prefix");
  refused({{"/post_processor/type", "BertProcessing"}}, "post_processor BertProcessing");
  refused({{"/decoder/type", "WordPiece"}}, "decoder WordPiece");
  refused({{"/truncation", {{"max_length", 3}}}}, "truncation");
  refused({{"/padding", {{"pad_id", 3}}}}, "padding");
  EXPECT_THAT(LoadChanged({{"/pre_tokenizer", {{"type", "ByteLevel"}, {"use_regex", false}}}},
                          R"({"pretokenize_regex": "."})"),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("beside no pattern")));
}

}  // namespace
}  // namespace lockstep
