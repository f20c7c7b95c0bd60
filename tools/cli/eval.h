// `lockstep eval golden`: compares a checkpoint folder, served by local workers, with the reference
// outputs in its golden.safetensors.
#pragma once

#include "CLI/App.hpp"

namespace lockstep {
namespace cli {

void AddEval(CLI::App* app, int* exit_code);

}  // namespace cli
}  // namespace lockstep
