// Test matchers for absl::Status and absl::StatusOr.
//
//   EXPECT_THAT(Load(path), IsOk());
//   EXPECT_THAT(Load(bad), StatusIs(absl::StatusCode::kDataLoss, HasSubstr("3 bytes missing")));
//   ASSERT_OK_AND_ASSIGN(auto model, Load(path));
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep {
namespace testing {

inline const absl::Status& GetStatus(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& status_or) {
  return status_or.status();
}

MATCHER(IsOk, "is OK") {
  *result_listener << GetStatus(arg).ToString();
  return GetStatus(arg).ok();
}

MATCHER_P(StatusIs, code, "has the status code " + absl::StatusCodeToString(code)) {
  *result_listener << GetStatus(arg).ToString();
  return GetStatus(arg).code() == code;
}

MATCHER_P2(StatusIs, code, message_matcher,
           "has the status code " + absl::StatusCodeToString(code) + " and a matching message") {
  *result_listener << GetStatus(arg).ToString();
  return GetStatus(arg).code() == code &&
         ::testing::Matches(message_matcher)(std::string(GetStatus(arg).message()));
}

}  // namespace testing
}  // namespace lockstep

#define LOCKSTEP_TEST_CONCAT_INNER(a, b) a##b
#define LOCKSTEP_TEST_CONCAT(a, b) LOCKSTEP_TEST_CONCAT_INNER(a, b)
#define ASSERT_OK_AND_ASSIGN(lhs, expr) \
  LOCKSTEP_ASSERT_OK_AND_ASSIGN(LOCKSTEP_TEST_CONCAT(test_status_or_, __LINE__), lhs, expr)
#define LOCKSTEP_ASSERT_OK_AND_ASSIGN(tmp, lhs, expr) \
  auto tmp = (expr);                                  \
  ASSERT_TRUE(tmp.ok()) << tmp.status().ToString();   \
  lhs = std::move(tmp).value()
#define ASSERT_OK(expr) ASSERT_THAT(expr, ::lockstep::testing::IsOk())
#define EXPECT_OK(expr) EXPECT_THAT(expr, ::lockstep::testing::IsOk())
