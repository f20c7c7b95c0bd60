// fault_worker: lockstep_worker, linked from the same libraries, with faults that tests impose.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "tests/fault_injector.h"
#include "tests/fault_rule.h"
#include "worker/worker_main.h"

namespace lockstep {
namespace testing {
namespace {

// "151=abort".
bool ParseToken(absl::string_view text, int32_t* id) {
  return absl::ConsumeSuffix(&text, "=abort") && absl::SimpleAtoi(text, id);
}

int Main(int argc, char** argv) {
  std::vector<std::string> rules, tokens;
  FaultOptions options;
  std::unique_ptr<FaultInjector> faults;
  WorkerMainHooks hooks;
  hooks.add_flags = [&](CLI::App* app) {
    app->add_option("--fault", rules, "PHASE[:N]=KIND[,MS]: see tests/fault_rule.h")
        ->allow_extra_args(false)
        ->check([](const std::string& text) {
          const auto rule = ParseFaultRule(text);
          return rule.ok() ? std::string() : std::string(rule.status().message());
        });
    app->add_option("--fault-token", tokens, "ID=abort: abort when a step contains that token")
        ->allow_extra_args(false)
        ->check([](const std::string& text) {
          int32_t id = 0;
          return ParseToken(text, &id) ? std::string() : "'" + text + "' is not ID=abort";
        });
    app->add_option("--fault-once", options.once_file,
                    "File of the rules that have fired, which fire no more");
    app->add_option("--strikes", options.strike_prefix,
                    "PREFIX of files PREFIX.RANK: a rule that appears there strikes that rank once")
        ->check([](const std::string& text) { return text.empty() ? "is empty" : ""; });
    app->add_option("--ledger", options.ledger,
                    "File that gets 'epoch step slot generation position' of what is sampled");
  };
  hooks.wrap_loader = [&](ModelLoader loader) {
    for (const std::string& text : rules) options.rules.push_back(*ParseFaultRule(text));
    for (const std::string& text : tokens) {
      int32_t id = 0;
      ParseToken(text, &id);
      options.poison_ids.push_back(id);
    }
    faults = std::make_unique<FaultInjector>(options);
    return faults->WrapLoader(std::move(loader));
  };
  hooks.make_service = [&](Worker* worker) { return faults->MakeService(worker); };
  return WorkerMain(argc, argv, hooks);
}

}  // namespace
}  // namespace testing
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::testing::Main(argc, argv); }
