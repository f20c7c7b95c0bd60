// CHECK: ends the process with a message when one of our own invariants is broken.
// For the world's faults (files, peers, requests) return absl::Status instead.
//
//   CHECK(rows > 0) << "rows is " << rows;
//   CHECK_EQ(a.size(), b.size());
//   CHECK_OK(status);
#pragma once

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "absl/status/status.h"

namespace lockstep {
namespace internal {

class FatalMessage {
 public:
  FatalMessage(const char* file, int line, const char* what) {
    stream_ << file << ":" << line << ": check failed: " << what << " ";
  }
  [[noreturn]] ~FatalMessage() {
    std::cerr << stream_.str() << std::endl;
    std::abort();
  }
  std::ostream& stream() { return stream_; }

 private:
  std::ostringstream stream_;
};

struct Voidify {
  void operator&(std::ostream&) {}
};

}  // namespace internal
}  // namespace lockstep

#define CHECK(condition)                  \
  __builtin_expect(!!(condition), 1)      \
      ? (void)0                           \
      : ::lockstep::internal::Voidify() & \
            ::lockstep::internal::FatalMessage(__FILE__, __LINE__, #condition).stream()
#define CHECK_EQ(a, b) CHECK((a) == (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_NE(a, b) CHECK((a) != (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_LT(a, b) CHECK((a) < (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_LE(a, b) CHECK((a) <= (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_GT(a, b) CHECK((a) > (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_GE(a, b) CHECK((a) >= (b)) << "(" << (a) << " vs " << (b) << ") "
#define CHECK_OK(expr)                                                \
  do {                                                                \
    const ::absl::Status check_ok_status = (expr);                    \
    CHECK(check_ok_status.ok()) << check_ok_status.ToString() << " "; \
  } while (false)
