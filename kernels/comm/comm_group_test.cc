// The collectives suite: what a CommGroup promises, run against every transport.
#include "kernels/comm/comm_group.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/base/hash.h"
#include "kernels/base/testing/matchers.h"
#include "kernels/comm/comm_self_test.h"
#include "kernels/comm/fake_comm_group.h"
#include "kernels/comm/process_comm_listener.h"
#include "kernels/comm/solo_comm_group.h"

namespace lockstep {
namespace {

using ::lockstep::testing::IsOk;
using ::lockstep::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Groups = std::vector<std::unique_ptr<CommGroup>>;

// What an executor gives a group: one per rank.
struct RankContext {
  explicit RankContext(int64_t workspace_bytes = 16 << 20) {
    CHECK_OK(workspace.Allocate(DeviceType::kCpu, workspace_bytes));
    ctx.pool = &pool;
    ctx.workspace = &workspace;
    ctx.counters = &counters;
  }
  ThreadPool pool{1};
  Workspace workspace;
  Counters counters;
  ExecContext ctx;
};

Groups MakeFake(int size, uint64_t epoch, absl::Duration timeout) {
  return MakeFakeCommGroups(size, epoch, timeout);
}

Groups MakeProcess(int size, uint64_t epoch, absl::Duration timeout) {
  ProcessCommOptions options;
  options.collective_timeout = timeout;
  std::vector<std::unique_ptr<ProcessCommListener>> listeners;
  std::vector<std::string> addresses;
  for (int r = 0; r < size; ++r) {
    listeners.push_back(*ProcessCommListener::Listen(options));
    addresses.push_back(listeners.back()->address());
  }
  Groups groups(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      auto group =
          listeners[static_cast<size_t>(r)]->Connect(epoch, r, addresses, absl::Seconds(20));
      CHECK_OK(group.status());
      groups[static_cast<size_t>(r)] = *std::move(group);
    });
  }
  for (std::thread& t : threads) t.join();
  return groups;
}

struct Transport {
  const char* name;
  std::function<Groups(int size, uint64_t epoch, absl::Duration timeout)> make;
};

void RunRanks(const Groups& groups, const std::function<void(CommGroup*)>& body) {
  std::vector<std::thread> threads;
  for (const auto& group : groups) threads.emplace_back([&, g = group.get()] { body(g); });
  for (std::thread& t : threads) t.join();
}

float Special(uint64_t h) {
  static const float kValues[] = {-0.0f,
                                  0.0f,
                                  std::numeric_limits<float>::infinity(),
                                  std::numeric_limits<float>::denorm_min(),
                                  -std::numeric_limits<float>::denorm_min(),
                                  std::numeric_limits<float>::max(),
                                  1e-38f,
                                  -1e30f};
  return kValues[h % 8];
}

// Deterministic inputs; `special` mixes in the values that bad sums stumble over.
std::vector<float> Input(uint64_t seed, int rank, int64_t n, bool special) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t h =
        Mix64(Mix64(seed * 31 + static_cast<uint64_t>(rank)) + static_cast<uint64_t>(i));
    const float plain = static_cast<float>(static_cast<int32_t>(h)) * 1e-6f *
                        static_cast<float>(1 << ((h >> 40) % 20));
    values.push_back(special && (h >> 60) < 6 ? Special(h >> 32) : plain);
  }
  return values;
}

float TreeOracle(const std::vector<std::vector<float>>& parts, size_t first, size_t count,
                 size_t i) {
  if (count == 1) return parts[first][i];
  return TreeOracle(parts, first, count / 2, i) +
         TreeOracle(parts, first + count / 2, count / 2, i);
}

bool SameBits(float a, float b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0 || (a != a && b != b);
}

constexpr float kCanary = 12345.0f;

// One all-reduce of every rank against the oracle; canaries stand on both sides of the data.
void CheckAllReduceOnce(const Groups& groups, uint64_t seed, int64_t n, bool special) {
  const size_t world = groups.size();
  std::vector<std::vector<float>> inputs;
  for (size_t r = 0; r < world; ++r) {
    inputs.push_back(Input(seed, static_cast<int>(r), n, special));
  }
  RunRanks(groups, [&](CommGroup* group) {
    RankContext rank;
    std::vector<float> buffer(static_cast<size_t>(n) + 2, kCanary);
    const std::vector<float>& mine = inputs[static_cast<size_t>(group->rank())];
    std::copy(mine.begin(), mine.end(), buffer.begin() + 1);
    group->BeginStep(seed, seed * 3);
    ASSERT_OK(group->AllReduce(&rank.ctx, TensorView(buffer.data() + 1, DType::kF32, Shape{n})));
    for (int64_t i = 0; i < n; ++i) {
      const float expected = TreeOracle(inputs, 0, world, static_cast<size_t>(i));
      ASSERT_TRUE(SameBits(buffer[static_cast<size_t>(i) + 1], expected)) << "element " << i;
    }
    EXPECT_EQ(buffer.front(), kCanary);
    EXPECT_EQ(buffer.back(), kCanary);
    EXPECT_EQ(rank.counters.collectives.load(), 1);
    EXPECT_EQ(rank.counters.Get(Traffic::kCollectivesSent),
              n * 4 * static_cast<int64_t>(world - 1));
  });
}

class CommGroupTest : public ::testing::TestWithParam<Transport> {
 protected:
  Groups Make(int size, absl::Duration timeout = absl::Seconds(60), uint64_t epoch = 5) {
    return GetParam().make(size, epoch, timeout);
  }
};

TEST_P(CommGroupTest, AllReduceIsTheTreeSumForEverySizeAndWorld) {
  const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 255, 1000, 4097, 65536, 100003, 262144, 262145};
  for (int world : {1, 2, 4, 8}) {
    const Groups groups = Make(world);
    uint64_t seed = 1;
    for (int64_t n : sizes) {
      if (world == 8 && n > 100003) continue;
      CheckAllReduceOnce(groups, seed, n, seed % 2 == 0);
      ++seed;
    }
  }
}

TEST_P(CommGroupTest, AllGatherKeepsRankOrderForEveryDType) {
  for (int world : {1, 2, 4}) {
    const Groups groups = Make(world);
    RunRanks(groups, [&](CommGroup* group) {
      RankContext rank;
      group->BeginStep(1, 1);
      for (DType dtype : {DType::kF32, DType::kBF16, DType::kI32, DType::kU8, DType::kI64}) {
        const int64_t n = 3 * 5;
        const int64_t bytes = n * SizeOf(dtype);
        std::vector<uint8_t> local(static_cast<size_t>(bytes),
                                   static_cast<uint8_t>(group->rank() + 1));
        std::vector<uint8_t> out(static_cast<size_t>(bytes * world + 1), 99);
        ASSERT_OK(group->AllGather(&rank.ctx, ConstTensorView(local.data(), dtype, Shape{3, 5}),
                                   TensorView(out.data(), dtype, Shape{world, 3, 5})));
        for (int64_t i = 0; i < bytes * world; ++i) {
          ASSERT_EQ(out[static_cast<size_t>(i)], i / bytes + 1);
        }
        EXPECT_EQ(out.back(), 99);
      }
    });
  }
}

TEST_P(CommGroupTest, LargeMessagesDoNotBlockTheGroup) {
  const Groups groups = Make(2);
  RunRanks(groups, [&](CommGroup* group) {
    RankContext rank;
    group->BeginStep(1, 1);
    const int64_t n = 64 << 20;
    std::vector<uint8_t> local(n, static_cast<uint8_t>(7 + group->rank()));
    std::vector<uint8_t> out(2 * n);
    ASSERT_OK(group->AllGather(&rank.ctx, ConstTensorView(local.data(), DType::kU8, Shape{n}),
                               TensorView(out.data(), DType::kU8, Shape{2, n})));
    EXPECT_EQ(out[0], 7);
    EXPECT_EQ(out[n - 1], 7);
    EXPECT_EQ(out[n], 8);
    EXPECT_EQ(out[2 * n - 1], 8);
  });
}

TEST_P(CommGroupTest, ThousandsOfReplaysWithSkewGiveTheSameBits) {
  const Groups groups = Make(2);
  const int64_t n = 777;
  const std::vector<std::vector<float>> inputs = {Input(9, 0, n, true), Input(9, 1, n, true)};
  RunRanks(groups, [&](CommGroup* group) {
    RankContext rank;
    std::mt19937 rng(static_cast<unsigned>(group->rank()));
    std::vector<float> buffer(n);
    for (uint64_t step = 1; step <= 3000; ++step) {
      if (rng() % 64 == 0) absl::SleepFor(absl::Microseconds(rng() % 300));
      buffer = inputs[static_cast<size_t>(group->rank())];
      group->BeginStep(step, Mix64(step));
      ASSERT_OK(group->AllReduce(&rank.ctx, TensorView(buffer.data(), DType::kF32, Shape{n})));
      for (size_t i = 0; i < n; ++i) {
        ASSERT_TRUE(SameBits(buffer[i], TreeOracle(inputs, 0, 2, i))) << step << ", " << i;
      }
    }
  });
}

TEST_P(CommGroupTest, BarrierWaitsForEveryRank) {
  const Groups groups = Make(4);
  std::atomic<int> arrived{0};
  RunRanks(groups, [&](CommGroup* group) {
    RankContext rank;
    group->BeginStep(1, 1);
    for (int round = 1; round <= 50; ++round) {
      ++arrived;
      ASSERT_OK(group->Barrier(&rank.ctx));
      EXPECT_GE(arrived.load(), 4 * round);
      ASSERT_OK(group->Barrier(&rank.ctx));
    }
  });
}

TEST_P(CommGroupTest, SelfTestAgreesOnAllRanks) {
  for (int world : {1, 2, 8}) {
    const Groups groups = Make(world);
    std::vector<uint64_t> digests(static_cast<size_t>(world));
    RunRanks(groups, [&](CommGroup* group) {
      RankContext rank;
      ASSERT_OK_AND_ASSIGN(digests[static_cast<size_t>(group->rank())],
                           RunCommSelfTest(&rank.ctx, group));
    });
    for (uint64_t digest : digests) EXPECT_EQ(digest, digests[0]);
    EXPECT_NE(digests[0], 0u);
  }
}

TEST_P(CommGroupTest, DryRunTakesWhatTheRunNeedsAndMovesNothing) {
  const Groups groups = Make(2);
  Workspace counting;
  Counters counters;
  ThreadPool pool(1);
  ExecContext ctx;
  ctx.pool = &pool;
  ctx.workspace = &counting;
  ctx.counters = &counters;
  ASSERT_OK(groups[0]->AllReduce(&ctx, TensorView(nullptr, DType::kF32, Shape{1000})));
  ASSERT_OK(groups[0]->AllGather(&ctx, ConstTensorView(nullptr, DType::kF32, Shape{10}),
                                 TensorView(nullptr, DType::kF32, Shape{2, 10})));
  ASSERT_OK(groups[0]->Barrier(&ctx));
  EXPECT_EQ(counters.Get(Traffic::kCollectivesSent), 0);
  RunRanks(groups, [&](CommGroup* group) {
    RankContext rank(counting.peak());
    std::vector<float> data(1000, 1.0f);
    group->BeginStep(1, 1);
    ASSERT_OK(group->AllReduce(&rank.ctx, TensorView(data.data(), DType::kF32, Shape{1000})));
    EXPECT_EQ(data[999], 2.0f);
  });
}

TEST_P(CommGroupTest, AbortEndsAWaitingCollectiveAndTellsThePeers) {
  const Groups groups = Make(4);
  std::vector<absl::Status> status(4);
  const absl::Time start = absl::Now();
  std::thread abort([&] {
    absl::SleepFor(absl::Milliseconds(50));
    groups[1]->Abort("a test says so");
  });
  RunRanks(groups, [&](CommGroup* group) {
    if (group->rank() == 3) return;  // never comes
    RankContext rank;
    group->BeginStep(1, 1);
    status[static_cast<size_t>(group->rank())] = group->Barrier(&rank.ctx);
  });
  abort.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_THAT(status[1], StatusIs(absl::StatusCode::kAborted, HasSubstr("a test says so")));
  for (int r : {0, 2}) {
    EXPECT_THAT(status[static_cast<size_t>(r)],
                StatusIs(absl::StatusCode::kAborted, HasSubstr("a test says so")));
  }
  // The rank that was computing meanwhile finds frames of the collective that its peers had begun,
  // and learns of the end at the next one at the latest.
  RankContext rank;
  groups[3]->BeginStep(1, 1);
  absl::Status last = groups[3]->Barrier(&rank.ctx);
  if (last.ok()) last = groups[3]->Barrier(&rank.ctx);
  EXPECT_THAT(last, StatusIs(absl::StatusCode::kAborted, HasSubstr("a test says so")));
}

TEST_P(CommGroupTest, ABrokenGroupKeepsItsFirstError) {
  const Groups groups = Make(2);
  groups[0]->Abort("first");
  groups[0]->Abort("second");
  RankContext rank;
  float x = 1.0f;
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(groups[0]->AllReduce(&rank.ctx, TensorView(&x, DType::kF32, Shape{1})),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("first")));
  }
  EXPECT_EQ(x, 1.0f);
}

TEST_P(CommGroupTest, ASilentRankIsNamedAfterTheTimeBound) {
  const Groups groups = Make(2, absl::Milliseconds(200));
  RankContext rank;
  groups[0]->BeginStep(4, 1);
  EXPECT_THAT(groups[0]->Barrier(&rank.ctx),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank 1 did not answer")));
}

TEST_P(CommGroupTest, DisagreementNamesBothSides) {
  struct Case {
    const char* name;
    std::function<absl::Status(CommGroup*, ExecContext*)> body;
  };
  float data[4] = {};
  const Case cases[] = {
      {"digest",
       [](CommGroup* g, ExecContext* ctx) {
         g->BeginStep(3, 100 + static_cast<uint64_t>(g->rank()));
         return g->Barrier(ctx);
       }},
      {"step",
       [](CommGroup* g, ExecContext* ctx) {
         g->BeginStep(3 + static_cast<uint64_t>(g->rank()), 1);
         return g->Barrier(ctx);
       }},
      {"bytes",
       [&](CommGroup* g, ExecContext* ctx) {
         g->BeginStep(3, 1);
         float mine[4] = {};
         return g->AllReduce(ctx, TensorView(mine, DType::kF32, Shape{1 + g->rank()}));
       }},
      {"kind",
       [&](CommGroup* g, ExecContext* ctx) {
         g->BeginStep(3, 1);
         if (g->rank() == 0) return g->Barrier(ctx);
         return g->AllReduce(ctx, TensorView(data, DType::kF32, Shape{0}));
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const Groups groups = Make(2);
    RunRanks(groups, [&](CommGroup* group) {
      RankContext rank;
      EXPECT_THAT(c.body(group, &rank.ctx),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           AllOf(HasSubstr("disagree"), HasSubstr("rank 0 is at"),
                                 HasSubstr("rank 1 is at"))));
    });
  }
}

TEST_P(CommGroupTest, APeerThatGoesAwayIsNamed) {
  Groups groups = Make(2);
  std::thread gone([&] {
    absl::SleepFor(absl::Milliseconds(30));
    groups[1].reset();
  });
  RankContext rank;
  groups[0]->BeginStep(1, 1);
  EXPECT_THAT(groups[0]->Barrier(&rank.ctx),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1")));
  gone.join();
}

TEST_P(CommGroupTest, WrongArgumentsAreRefusedBeforeAnythingMoves) {
  const Groups groups = Make(2);
  RankContext rank;
  int32_t ints[4] = {};
  float floats[4] = {};
  EXPECT_THAT(groups[0]->AllReduce(&rank.ctx, TensorView(ints, DType::kI32, Shape{4})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("F32")));
  EXPECT_THAT(groups[0]->AllGather(&rank.ctx, ConstTensorView(floats, DType::kF32, Shape{2}),
                                   TensorView(floats, DType::kF32, Shape{3})),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("all_gather")));
  // The group is still whole.
  RunRanks(groups, [&](CommGroup* group) {
    RankContext mine;
    group->BeginStep(1, 1);
    EXPECT_OK(group->Barrier(&mine.ctx));
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, CommGroupTest,
                         ::testing::Values(Transport{"fake", MakeFake},
                                           Transport{"process", MakeProcess}),
                         [](const auto& info) { return info.param.name; });

TEST(SoloCommGroup, CopiesAndBreaks) {
  SoloCommGroup solo(3);
  RankContext rank;
  float x[2] = {-0.0f, 2.0f};
  float y[2] = {};
  EXPECT_OK(solo.AllReduce(&rank.ctx, TensorView(x, DType::kF32, Shape{2})));
  EXPECT_OK(solo.AllGather(&rank.ctx, ConstTensorView(x, DType::kF32, Shape{2}),
                           TensorView(y, DType::kF32, Shape{1, 2})));
  EXPECT_EQ(std::memcmp(x, y, sizeof(x)), 0);
  solo.Abort("enough");
  EXPECT_THAT(solo.Barrier(&rank.ctx), StatusIs(absl::StatusCode::kAborted, HasSubstr("enough")));
}

// ---- forming a group of processes ----

std::unique_ptr<ProcessCommListener> Listen() { return *ProcessCommListener::Listen({}); }

absl::Status JoinBoth(ProcessCommListener* a, ProcessCommListener* b, uint64_t epoch_a,
                      uint64_t epoch_b, absl::Status* of_b) {
  const std::vector<std::string> addresses = {a->address(), b->address()};
  std::thread other(
      [&] { *of_b = b->Connect(epoch_b, 1, addresses, absl::Milliseconds(700)).status(); });
  const absl::Status of_a = a->Connect(epoch_a, 0, addresses, absl::Milliseconds(700)).status();
  other.join();
  return of_a;
}

TEST(ProcessCommListener, AnotherEpochIsRefusedWithBothNumbers) {
  auto a = Listen(), b = Listen();
  absl::Status of_b;
  const absl::Status of_a = JoinBoth(a.get(), b.get(), 7, 6, &of_b);
  EXPECT_THAT(of_b, StatusIs(absl::StatusCode::kFailedPrecondition,
                             AllOf(HasSubstr("epoch 7"), HasSubstr("epoch 6"))));
  EXPECT_THAT(of_a, StatusIs(absl::StatusCode::kDeadlineExceeded,
                             AllOf(HasSubstr("rank 1 did not connect"), HasSubstr("epoch 6"))));
}

TEST(ProcessCommListener, AWrongTokenIsRefused) {
  auto a = Listen(), b = Listen();
  std::string forged = a->address();
  forged.back() = forged.back() == '0' ? '1' : '0';
  std::thread first([&] {
    EXPECT_THAT(a->Connect(1, 0, {a->address(), b->address()}, absl::Milliseconds(500)).status(),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("wrong token")));
  });
  EXPECT_THAT(b->Connect(1, 1, {forged, b->address()}, absl::Milliseconds(500)).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("wrong token")));
  first.join();
}

TEST(ProcessCommListener, StrangersDoNotDisturb) {
  auto a = Listen(), b = Listen();
  const std::string port_and_token = std::vector<std::string>(absl::StrSplit(a->address(), ':'))[1];
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(port_and_token)));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> strangers;
  for (int i = 0; i < 20; ++i) {
    strangers.push_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(strangers.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (i % 2 == 0) {
      const char junk[] = "GET / HTTP/1.1\r\n\r\n";
      EXPECT_GT(send(strangers.back(), junk, sizeof(junk), MSG_NOSIGNAL), 0);
    }
  }
  absl::Status of_b;
  EXPECT_OK(JoinBoth(a.get(), b.get(), 1, 1, &of_b));
  EXPECT_OK(of_b);
  for (int fd : strangers) close(fd);
}

TEST(ProcessCommListener, RefusesAddressesThatAreNone) {
  auto a = Listen();
  EXPECT_THAT(a->Connect(1, 0, {"elsewhere", a->address()}, absl::Seconds(1)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank 0")));
  EXPECT_THAT(a->Connect(1, 1, {"elsewhere", a->address()}, absl::Seconds(1)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host:port|token")));
  EXPECT_THAT(a->Connect(1, 2, {a->address(), "", a->address()}, absl::Seconds(1)).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("power of two")));
}

TEST(ProcessCommListener, CancelEndsConnect) {
  auto a = Listen(), b = Listen();
  std::thread cancel([&] {
    absl::SleepFor(absl::Milliseconds(30));
    a->Cancel();
  });
  EXPECT_THAT(a->Connect(1, 0, {a->address(), b->address()}, absl::Seconds(30)).status(),
              StatusIs(absl::StatusCode::kCancelled));
  cancel.join();
}

TEST(ProcessCommGroup, ADeadProcessInTheMiddleOfAFrameEndsTheCollective) {
  auto a = Listen(), b = Listen();
  const std::vector<std::string> addresses = {a->address(), b->address()};
  const int64_t n = 8 << 20;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto group = b->Connect(1, 1, addresses, absl::Seconds(20));
    RankContext rank;
    std::vector<float> small(1, 1.0f);
    (*group)->BeginStep(1, 1);
    const bool ok =
        group.ok() &&
        (*group)->AllReduce(&rank.ctx, TensorView(small.data(), DType::kF32, Shape{1})).ok();
    _exit(ok ? 0 : 1);  // dies while rank 0 is on its way into the next collective
  }
  ASSERT_OK_AND_ASSIGN(auto group, a->Connect(1, 0, addresses, absl::Seconds(20)));
  RankContext rank(64 << 20);
  std::vector<float> data(n, 1.0f);
  group->BeginStep(1, 1);
  ASSERT_OK(group->AllReduce(&rank.ctx, TensorView(data.data(), DType::kF32, Shape{1})));
  EXPECT_EQ(data[0], 2.0f);
  EXPECT_THAT(group->AllReduce(&rank.ctx, TensorView(data.data(), DType::kF32, Shape{n})),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank 1")));
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace lockstep
