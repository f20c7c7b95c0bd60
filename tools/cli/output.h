// How the verbs print what a server says: --output table or json.
#pragma once

#include <string>
#include <vector>

#include "CLI/App.hpp"
#include "google/protobuf/message.h"

namespace lockstep {
namespace cli {

// The --output flag.
struct OutputFlag {
  std::string format = "table";

  void AddTo(CLI::App* app);
  bool json() const { return format == "json"; }
};

// One line of JSON on stdout, with every field.
void PrintJson(const google::protobuf::Message& message);

// Columns as wide as their widest cell, on stdout. The first row is the heading.
void PrintTable(const std::vector<std::vector<std::string>>& rows);

}  // namespace cli
}  // namespace lockstep
