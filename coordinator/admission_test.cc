#include "coordinator/admission.h"

#include <string>

#include "coordinator/errors.h"
#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

const absl::Time kStart = absl::UnixEpoch();

absl::Duration RetryAfter(const absl::Status& status) {
  google::rpc::Status details;
  google::rpc::RetryInfo retry;
  if (!details.ParseFromString(DetailsOf(status))) return absl::ZeroDuration();
  for (const auto& any : details.details()) {
    if (any.UnpackTo(&retry)) {
      return absl::Seconds(retry.retry_delay().seconds()) +
             absl::Nanoseconds(retry.retry_delay().nanos());
    }
  }
  return absl::ZeroDuration();
}

TEST(AdmissionTest, BoundsRequestsAndTokens) {
  Admission admission(2, 100);
  EXPECT_OK(admission.Check(1000, absl::InfiniteFuture(), kStart)) << "the queue is empty";
  admission.OnQueued(60, kStart);
  EXPECT_OK(admission.Check(40, absl::InfiniteFuture(), kStart));
  const absl::Status tokens = admission.Check(41, absl::InfiniteFuture(), kStart);
  EXPECT_EQ(ReasonOf(tokens), "QUEUE_FULL");
  EXPECT_GE(RetryAfter(tokens), absl::Seconds(1));
  admission.OnQueued(1, kStart);
  EXPECT_EQ(ReasonOf(admission.Check(1, absl::InfiniteFuture(), kStart)), "QUEUE_FULL");
  admission.OnRemoved(60, kStart);
  EXPECT_OK(admission.Check(1, absl::InfiniteFuture(), kStart));
  EXPECT_EQ(admission.requests(), 1);
  EXPECT_EQ(admission.tokens(), 1);
}

TEST(AdmissionTest, PredictsFromHowTheQueueMoved) {
  Admission admission(1000, 1 << 20);
  // 100 requests of 10 tokens; 20 of them leave, one each 100 ms: 100 tokens a second.
  for (int i = 0; i < 100; ++i) admission.OnQueued(10, kStart);
  absl::Time now = kStart;
  for (int i = 0; i < 20; ++i) {
    now += absl::Milliseconds(100);
    admission.OnScheduled(10, now);
  }
  EXPECT_EQ(admission.PredictedWait(now), absl::Seconds(8));
  EXPECT_OK(admission.Check(10, now + absl::Seconds(9), now));
  const absl::Status late = admission.Check(10, now + absl::Seconds(6), now);
  EXPECT_TRUE(absl::IsResourceExhausted(late)) << late;
  EXPECT_EQ(ReasonOf(late), "DEADLINE_UNMEETABLE");
  EXPECT_EQ(RetryAfter(late), absl::Seconds(2));
  EXPECT_THAT(std::string(late.message()), ::testing::HasSubstr("takes about 8s"));
  EXPECT_OK(admission.Check(10, absl::InfiniteFuture(), now));
  // A removed request says nothing about speed: 79 are left.
  admission.OnRemoved(10, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 7.9, 1e-6);
}

TEST(AdmissionTest, OnlyTheLastWindowCounts) {
  Admission admission(1000, 1 << 20);
  absl::Time now = kStart;
  for (int i = 0; i < 50; ++i) admission.OnQueued(10, now);
  for (int i = 0; i < 20; ++i) {  // slow: 10 tokens a second
    now += absl::Seconds(1);
    admission.OnScheduled(10, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 300 / 10.0, 4);
  for (int i = 0; i < 25; ++i) {  // and then fast: 25 tokens a second
    now += absl::Milliseconds(400);
    admission.OnScheduled(10, now);
  }
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 50 / 25.0, 0.2);
}

TEST(AdmissionTest, TimeWithoutAQueueDoesNotCount) {
  Admission admission(10, 1000);
  absl::Time now = kStart;
  for (int i = 0; i < 9; ++i) {  // each waits 100 ms, with pauses between
    admission.OnQueued(10, now);
    now += absl::Milliseconds(100);
    admission.OnScheduled(10, now);
    now += absl::Milliseconds(900);
  }
  admission.OnQueued(50, now);
  EXPECT_NEAR(absl::ToDoubleSeconds(admission.PredictedWait(now)), 0.5, 1e-6);
}

TEST(AdmissionTest, AStuckQueueIsExpectedToStayStuck) {
  Admission admission(10, 1000);
  admission.OnQueued(10, kStart);
  EXPECT_EQ(admission.PredictedWait(kStart + Admission::kLeastEvidence / 2), absl::ZeroDuration());
  const absl::Time later = kStart + absl::Seconds(3);
  EXPECT_EQ(admission.PredictedWait(later), absl::Seconds(3));
  EXPECT_EQ(ReasonOf(admission.Check(1, later + absl::Seconds(2), later)), "DEADLINE_UNMEETABLE");
  EXPECT_OK(admission.Check(1, later + absl::Seconds(4), later));
  // And an empty one is no reason to refuse anything.
  admission.OnRemoved(10, later);
  EXPECT_OK(admission.Check(1, later + absl::Nanoseconds(1), later));
}

}  // namespace
}  // namespace lockstep
