// `lockstep version`: see version.h.
#include "tools/cli/version.h"

#include <iostream>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Version.hpp"
#include "google/protobuf/stubs/common.h"
#include "grpcpp/grpcpp.h"
#include "kernels/base/version.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {

void AddVersion(CLI::App* app, int* exit_code) {
  CLI::App* verb =
      app->add_subcommand("version", "Print versions of this program and its libraries");
  verb->callback([exit_code]() {
    std::cout << "lockstep " << kVersion << "\n"
              << "grpc " << grpc::Version() << "\n"
              << "protobuf " << google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION)
              << "\n"
              << "cli11 " << CLI11_VERSION << "\n";
    *exit_code = kExitOk;
  });
}

}  // namespace cli
}  // namespace lockstep
