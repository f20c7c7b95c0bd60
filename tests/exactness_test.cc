// The exactness matrix: one request, one digest, whatever else happens. Through real coordinator
// and worker processes. A digest counts only when counters prove that its condition really held:
// chunks as asked, cached tokens, preemptions. TP is --tp; the reference is TP 1, alone, one chunk,
// cold.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "tests/cluster.h"

namespace lockstep {
namespace testing {
namespace {

using inference::v1::GenerateRequest;
using inference::v1::GenerateResult;

int tensor_parallel = 1;
std::string model_folder = "qwen3_5-trained-ct-nvfp4-fp8";
std::string activations = "bf16";
std::string activation_quant = "none";
// "cuda:N" puts every rank on that GPU.
std::string device = "cpu";
// Fewer where ranks share a GPU, which gives each of them a slice of time.
int64_t num_probes = 10;

constexpr int kVocab = 300;  // ids that every test model has
constexpr int kNeighbours = 15;

struct Probe {
  std::string name;
  GenerateRequest request;
};

GenerateRequest Request(std::mt19937* random, int prompt_tokens, int max_tokens, bool sampled) {
  GenerateRequest request;
  for (int i = 0; i < prompt_tokens; ++i) {
    request.mutable_token_ids()->add_ids(static_cast<int32_t>((*random)() % kVocab));
  }
  auto* sampling = request.mutable_sampling();
  sampling->set_max_tokens(max_tokens);
  if (sampled) {
    sampling->set_temperature(0.9f);
    sampling->set_top_p(0.95f);
    sampling->set_top_k(40);
    sampling->set_presence_penalty(0.3f);
    sampling->set_repetition_penalty(1.1f);
    sampling->set_seed((*random)());
  } else {
    sampling->set_temperature(0.0f);
  }
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

// Lengths on both sides of the 64-token grid; every prompt is long enough to be cached.
std::vector<Probe> Probes() {
  std::mt19937 random(20240601);
  std::vector<Probe> probes;
  for (int length : {65, 66, 100, 128, 129, 150, 191, 193, 200, 260}) {
    const bool sampled = probes.size() % 2 == 1;
    probes.push_back({absl::StrCat("prompt of ", length, sampled ? ", sampled" : ", greedy"),
                      Request(&random, length, 12, sampled)});
  }
  probes.resize(static_cast<size_t>(num_probes));
  return probes;
}

std::vector<GenerateRequest> Neighbours(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < kNeighbours; ++i) {
    requests.push_back(Request(&random, 1 + static_cast<int>(random() % 150),
                               8 + static_cast<int>(random() % 24), random() % 2 == 0));
  }
  return requests;
}

struct Condition {
  std::string chunk_policy;  // "" is one chunk
  int preempt_every = 0;
};

class Matrix {
 public:
  void Run(const Condition& condition, bool is_reference) {
    ClusterOptions options;
    options.model = TestModel(model_folder);
    options.tp = is_reference ? 1 : tensor_parallel;
    options.worker_flags = {"--device", device};
    options.chunk_policy = condition.chunk_policy;
    options.preempt_every = condition.preempt_every;
    options.coordinator_flags = {"--activations",  activations,      "--activation-quant",
                                 activation_quant, "--max-num-seqs", "16"};
    if (device != "cpu") options.coordinator_flags.push_back("--share-devices");
    ASSERT_OK_AND_ASSIGN(cluster_, Cluster::Start(options));
    condition_ = condition;
    const std::vector<Probe> probes = Probes();
    for (size_t p = 0; p < probes.size(); ++p) {
      if (is_reference) {
        Alone(p, probes[p], "cold", true);
        continue;
      }
      if (condition.preempt_every == 0) {
        Alone(p, probes[p], "cold", false);
        Alone(p, probes[p], "warm", false);
      }
      InBatch(p, probes[p], "cold");
      InBatch(p, probes[p], "warm");
      if (::testing::Test::HasFatalFailure()) return;
    }
    cluster_->ExpectIdle();
    cluster_.reset();
  }

  int64_t compared() const { return compared_; }
  int64_t equal() const { return equal_; }

 private:
  // A salt of its own makes a run cold; the warm run repeats the salt of the cold one.
  static std::string Salt(size_t p, const std::string& where) {
    return absl::StrCat(where, "-", p);
  }

  void Alone(size_t p, const Probe& probe, const std::string& cache, bool is_reference) {
    GenerateRequest request = probe.request;
    request.mutable_cache()->set_salt(Salt(p, "alone"));
    const int64_t chunks_before = cluster_->Status().counters().at("prefill_chunks");
    ASSERT_OK_AND_ASSIGN(const GenerateResult result, cluster_->Generate(request));
    const int64_t chunks = cluster_->Status().counters().at("prefill_chunks") - chunks_before;
    Count(p, probe, absl::StrCat("alone, ", cache), cache, result, chunks, is_reference);
  }

  void InBatch(size_t p, const Probe& probe, const std::string& cache) {
    std::vector<GenerateRequest> requests = Neighbours(static_cast<uint32_t>(17 * p + 3));
    GenerateRequest request = probe.request;
    request.mutable_cache()->set_salt(Salt(p, "batch"));
    // Last, so that it is the youngest: preemption takes the youngest first.
    requests.push_back(request);
    auto results = cluster_->GenerateAll(requests);
    for (const auto& result : results) ASSERT_TRUE(result.ok()) << result.status().ToString();
    Count(p, probe, absl::StrCat("with ", kNeighbours, " neighbours, ", cache), cache,
          *results.back(), -1, false);
  }

  void Count(size_t p, const Probe& probe, const std::string& where, const std::string& cache,
             const GenerateResult& result, int64_t chunks, bool is_reference) {
    ASSERT_EQ(result.outputs_size(), 1);
    const inference::v1::Output& output = result.outputs(0);
    const inference::v1::Finished& finished = output.finished();
    const std::vector<int32_t> ids(output.token_ids().begin(), output.token_ids().end());
    if (is_reference) {
      reference_digest_[p] = finished.determinism_digest();
      reference_ids_[p] = ids;
      return;
    }
    const std::string what =
        absl::StrCat("tp ", tensor_parallel, ", chunks \"", condition_.chunk_policy,
                     "\", preempt every ", condition_.preempt_every, ", ", where, ", ", probe.name);
    const int64_t cached = finished.usage().cached_prompt_tokens();
    const int64_t prompt = probe.request.token_ids().ids_size();
    // The condition must have held, or the digest proves nothing.
    if (cache == "cold" && finished.preemptions() == 0) {
      ASSERT_EQ(cached, 0) << what;
    }
    if (cache == "warm") {
      ASSERT_GT(cached, 0) << what;
    }
    if (chunks >= 0 && condition_.chunk_policy == "grid") {
      ASSERT_EQ(chunks, (prompt - cached + 63) / 64) << what;
    }
    if (chunks >= 0 && condition_.chunk_policy.empty()) {
      ASSERT_EQ(chunks, 1) << what;
    }
    if (condition_.preempt_every > 0 && finished.preemptions() == 0) {
      not_preempted_++;
      return;
    }
    compared_++;
    const bool same = finished.determinism_digest() == reference_digest_.at(p);
    equal_ += same;
    EXPECT_TRUE(same) << what << ": digest " << finished.determinism_digest() << ", reference "
                      << reference_digest_.at(p);
    EXPECT_EQ(ids, reference_ids_.at(p)) << what;
  }

  std::unique_ptr<Cluster> cluster_;
  Condition condition_;
  std::map<size_t, uint64_t> reference_digest_;
  std::map<size_t, std::vector<int32_t>> reference_ids_;
  int64_t compared_ = 0, equal_ = 0, not_preempted_ = 0;
};

TEST(Exactness, DigestsDoNotDependOnTpBatchChunkingCacheOrPreemption) {
  Matrix matrix;
  matrix.Run({"", 0}, /*is_reference=*/true);
  ASSERT_FALSE(HasFatalFailure());
  for (const Condition& condition :
       {Condition{"", 0}, Condition{"grid", 0}, Condition{"random:7", 0}, Condition{"", 5},
        Condition{"grid", 5}, Condition{"random:11", 5}}) {
    matrix.Run(condition, false);
    ASSERT_FALSE(HasFatalFailure());
  }
  std::printf("%lld digests, %lld equal (%s, tp %d, %s, %s activations, activation quant %s)\n",
              static_cast<long long>(matrix.compared()), static_cast<long long>(matrix.equal()),
              device.c_str(), tensor_parallel, model_folder.c_str(), activations.c_str(),
              activation_quant.c_str());
  EXPECT_EQ(matrix.compared(), matrix.equal());
  // 3 chunkings x probes x (2 alone + 2 in a batch), and those of 3 x probes x 2 that were
  // preempted.
  EXPECT_GE(matrix.compared(), 14 * num_probes);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const std::string value = equals == std::string::npos ? "" : arg.substr(equals + 1);
    if (arg.rfind("--tp=", 0) == 0) lockstep::testing::tensor_parallel = std::atoi(value.c_str());
    if (arg.rfind("--model=", 0) == 0) lockstep::testing::model_folder = value;
    if (arg.rfind("--probes=", 0) == 0) lockstep::testing::num_probes = std::atoi(value.c_str());
    if (arg.rfind("--device=", 0) == 0) lockstep::testing::device = value;
    if (arg.rfind("--activations=", 0) == 0) lockstep::testing::activations = value;
    if (arg.rfind("--activation-quant=", 0) == 0) lockstep::testing::activation_quant = value;
  }
  return RUN_ALL_TESTS();
}
