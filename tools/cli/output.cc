// How the verbs print what a server says: see output.h.
#include "tools/cli/output.h"

#include <algorithm>
#include <iostream>

#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "CLI/Validators.hpp"
#include "absl/strings/str_format.h"
#include "google/protobuf/util/json_util.h"

namespace lockstep {
namespace cli {

void OutputFlag::AddTo(CLI::App* app) {
  app->add_option("--output", format, "Print a table for people or a line of JSON")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
}

void PrintJson(const google::protobuf::Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(message, &text, options).ok()) return;
  std::cout << text << std::endl;
}

void PrintTable(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      const bool last = i + 1 == row.size();
      std::cout << absl::StreamFormat("%-*s", last ? 0 : static_cast<int>(widths[i]) + 2, row[i]);
    }
    std::cout << "\n";
  }
  std::cout << std::flush;
}

}  // namespace cli
}  // namespace lockstep
