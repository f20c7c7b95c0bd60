// RETURN_IF_ERROR and ASSIGN_OR_RETURN: pass a failed absl::Status to the caller.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define RETURN_IF_ERROR(expr)                       \
  do {                                              \
    ::absl::Status return_if_error_status = (expr); \
    if (!return_if_error_status.ok()) {             \
      return return_if_error_status;                \
    }                                               \
  } while (false)

#define LOCKSTEP_CONCAT_INNER(a, b) a##b
#define LOCKSTEP_CONCAT(a, b) LOCKSTEP_CONCAT_INNER(a, b)

// ASSIGN_OR_RETURN(auto x, MakeX());  declares or assigns x, or returns the error.
#define ASSIGN_OR_RETURN(lhs, expr) \
  LOCKSTEP_ASSIGN_OR_RETURN(LOCKSTEP_CONCAT(status_or_, __LINE__), lhs, expr)
#define LOCKSTEP_ASSIGN_OR_RETURN(tmp, lhs, expr) \
  auto tmp = (expr);                              \
  if (!tmp.ok()) {                                \
    return std::move(tmp).status();               \
  }                                               \
  lhs = std::move(tmp).value()
