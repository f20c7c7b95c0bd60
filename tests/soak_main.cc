// soak: requests under kills of workers, for as long as asked; prints one line of JSON. Exit code 0
// when nothing was lost, repeated, different or held. Runs in its runfiles: bazel run //tests:soak.
#include <cstdio>
#include <iostream>
#include <string>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/time/time.h"
#include "tests/cluster.h"
#include "tests/soak.h"

int main(int argc, char** argv) {
  lockstep::testing::SoakOptions options;
  double seconds = 300, kill_every = 20;
  std::string model = lockstep::testing::TestModel("qwen3_5-trained-ct-nvfp4-fp8");
  options.requests = 800;
  CLI::App app("Serves random requests while workers are killed");
  app.add_option("--seconds", seconds, "Time in which the requests arrive")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--requests", options.requests)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--kill-every", kill_every, "Seconds between kills")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--tp", options.tp)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
  app.add_option("--model", model, "Folder of the checkpoint; ids up to 299 are used")
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  options.time = absl::Seconds(seconds);
  options.kill_every = absl::Seconds(kill_every);
  options.model = model;
  const auto result = lockstep::testing::Soak(options);
  if (!result.ok()) {
    std::cerr << result.status() << std::endl;
    return 1;
  }
  std::printf("%s\n", result->Json().c_str());
  const bool good = result->lost == 0 && result->duplicated == 0 && result->different == 0 &&
                    result->digest_mismatches == 0 && result->kv_blocks_held == 0 &&
                    result->slots_held == 0 && result->requests == options.requests;
  return good ? 0 : 1;
}
