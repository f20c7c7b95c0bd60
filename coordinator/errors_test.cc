// Errors carry machine-readable details.
#include "coordinator/errors.h"

#include "gtest/gtest.h"
#include "kernels/base/testing/matchers.h"
#include "proto/error_details.pb.h"

namespace lockstep {
namespace {

TEST(ErrorsTest, CarriesReasonFieldMetadataAndRetry) {
  ErrorDetail detail;
  detail.reason = "QUEUE_FULL";
  detail.field = "input";
  detail.metadata = {{"limit", "7"}};
  detail.retry_after = absl::Milliseconds(1500);
  const absl::Status status = MakeError(absl::StatusCode::kResourceExhausted, "full", detail);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");

  google::rpc::Status wire;
  ASSERT_TRUE(wire.ParseFromString(DetailsOf(status)));
  EXPECT_EQ(wire.code(), 8);
  EXPECT_EQ(wire.message(), "full");
  ASSERT_EQ(wire.details_size(), 3);
  google::rpc::ErrorInfo info;
  ASSERT_TRUE(wire.details(0).UnpackTo(&info));
  EXPECT_EQ(info.domain(), "lockstep");
  EXPECT_EQ(info.metadata().at("limit"), "7");
  google::rpc::BadRequest bad_request;
  ASSERT_TRUE(wire.details(1).UnpackTo(&bad_request));
  EXPECT_EQ(bad_request.field_violations(0).field(), "input");
  google::rpc::RetryInfo retry;
  ASSERT_TRUE(wire.details(2).UnpackTo(&retry));
  EXPECT_EQ(retry.retry_delay().seconds(), 1);
  EXPECT_EQ(retry.retry_delay().nanos(), 500000000);
}

TEST(ErrorsTest, MessageIsMadeValidUtf8) {
  const absl::Status status = InvalidField("R", "f", "bad \xff byte");
  EXPECT_THAT(status, testing::StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(status.message(), "bad \xEF\xBF\xBD byte");
}

TEST(ErrorsTest, PlainStatusHasNoReason) {
  EXPECT_EQ(ReasonOf(absl::InternalError("x")), "");
  EXPECT_EQ(DetailsOf(absl::InternalError("x")), "");
}

TEST(ErrorsTest, TheCodeStandsInForAReason) {
  ErrorDetail detail;
  detail.reason = "QUEUE_FULL";
  EXPECT_EQ(ReasonOrCode(MakeError(absl::StatusCode::kResourceExhausted, "x", detail)),
            "QUEUE_FULL");
  EXPECT_EQ(ReasonOrCode(absl::CancelledError("x")), "CANCELLED");
}

}  // namespace
}  // namespace lockstep
