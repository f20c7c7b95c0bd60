// FaultMatrix: which faults strike a serving group, when, and how that must end. Data alone: the
// tests that impose the faults are elsewhere.
#pragma once

#include <string>
#include <vector>

#include "tests/fault_rule.h"

namespace lockstep {
namespace testing {

enum class MatrixPhase {
  kLoad,      // the first load of the server
  kInit,      // its first group
  kPrefill,   // the rest: of a server that has run before
  kDecode,    // streams run
  kSampling,  // streams run
  kIdle,      // nothing runs
  kDrain,     // streams run, and the server has been told to end
  kRecovery,  // the last rule strikes while the group recovers from those before
};
enum class Policy { kRestart, kSpare };
enum class Outcome {
  kRecovered,  // every stream ends as if nothing had happened; the fault is in the records
  kUnnoticed,  // likewise; there is no record
  kEither,     // one of these: whether another result was there to be overtaken is chance
  kRefused,    // the server does not come up, and says why
};

struct FaultRow {
  MatrixPhase phase;
  const char* rules;  // of the worker that holds `rank`, one after the other, joined by '+'
  int rank;
  int tp;
  Policy policy;
  Outcome outcome;
  // kRecovered: a recorded cause, "" where it is chance or the first group does
  // not exist yet. kRefused: part of
  // the message.
  const char* found;
  double bound_s;  // from the fault to all streams ended and the server READY
};

std::vector<FaultRow> FaultMatrix();

// Of the last rule.
FaultKind KindOf(const FaultRow& row);
const char* Name(MatrixPhase phase);
const char* Name(Policy policy);

}  // namespace testing
}  // namespace lockstep
