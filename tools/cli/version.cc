// `lockstep version`: see version.h.
#include "tools/cli/version.h"

#include <iostream>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Version.hpp"
#include "absl/strings/str_cat.h"
#include "google/protobuf/stubs/common.h"
#include "grpcpp/grpcpp.h"
#include "kernels/base/version.h"
#include "tools/cli/common.h"

namespace lockstep {
namespace cli {

std::string VersionText() {
  return absl::StrCat("lockstep ", kVersion, "\ngrpc ", grpc::Version(), "\nprotobuf ",
                      google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION),
                      "\ncli11 ", CLI11_VERSION);
}

void AddVersion(CLI::App* app, int* exit_code) {
  CLI::App* verb =
      app->add_subcommand("version", "Print versions of this program and its libraries");
  verb->callback([exit_code]() {
    std::cout << VersionText() << "\n";
    *exit_code = kExitOk;
  });
}

}  // namespace cli
}  // namespace lockstep
