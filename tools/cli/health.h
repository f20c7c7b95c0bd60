// `lockstep health`: readiness as an exit code.
#pragma once

#include "CLI/App.hpp"

namespace lockstep {
namespace cli {

// Adds the verb to `app`. When it is chosen it runs during parsing and stores its exit code.
void AddHealth(CLI::App* app, int* exit_code);

}  // namespace cli
}  // namespace lockstep
