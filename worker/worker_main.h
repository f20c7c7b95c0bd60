// WorkerMain: what lockstep_worker is, for its own main function and for test binaries that put
// something between its parts.
#pragma once

#include <grpcpp/impl/codegen/service_type.h>

#include <functional>
#include <memory>

#include "worker/model_loader.h"
#include "worker/worker.h"

namespace CLI {
class App;
}  // namespace CLI

namespace lockstep {

// Empty ones change nothing.
struct WorkerMainHooks {
  std::function<void(CLI::App* app)> add_flags;
  // Called once, when the flags are parsed.
  std::function<ModelLoader(ModelLoader loader)> wrap_loader;
  // The service in place of WorkerServiceImpl; called after wrap_loader.
  std::function<std::unique_ptr<grpc::Service>(Worker* worker)> make_service;
};

// Runs until a signal (or its --orphan-timeout) stops the process. Gives the exit code.
int WorkerMain(int argc, char** argv, const WorkerMainHooks& hooks = {});

}  // namespace lockstep
