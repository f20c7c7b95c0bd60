// The verbs of operators, all over the admin service of a server: `lockstep drain`, `undrain`,
// `cancel`, `requests`, `workers`, `faults`, `replace-worker`, `reset-prefix-cache`, `log-level`
// and `server-info`.
#pragma once

#include "CLI/App.hpp"

namespace lockstep {
namespace cli {

void AddAdminVerbs(CLI::App* app, int* exit_code);

}  // namespace cli
}  // namespace lockstep
