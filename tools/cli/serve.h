// `lockstep serve`: starts the workers of one machine and serves a model over them.
#pragma once

#include "CLI/App.hpp"

namespace lockstep {
namespace cli {

// Adds the verb to `app`. When it is chosen it runs during parsing and stores its exit code.
void AddServe(CLI::App* app, int* exit_code);

}  // namespace cli
}  // namespace lockstep
