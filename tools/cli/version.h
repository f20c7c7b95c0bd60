// `lockstep version`: versions of this program and its libraries.
#pragma once

#include <string>

#include "CLI/App.hpp"

namespace lockstep {
namespace cli {

// One line each: this program, then its libraries.
std::string VersionText();

// Adds the verb to `app`. When it is chosen it runs during parsing and stores its exit code.
void AddVersion(CLI::App* app, int* exit_code);

}  // namespace cli
}  // namespace lockstep
