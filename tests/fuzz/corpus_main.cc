// Runs a fuzzer's harness over every file of --corpus=DIR and over small changes of each: cut off
// at some places, and with single bytes replaced. The changes are the same in every run.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/base/hash.h"
#include "kernels/base/log.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace lockstep {
namespace {

constexpr size_t kCuts = 24;
constexpr size_t kReplaced = 72;

void Run(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

void RunChanges(const std::string& input) {
  Run(input);
  for (size_t i = 0; i < kCuts; ++i) Run(input.substr(0, input.size() * i / kCuts));
  if (input.empty()) return;
  for (size_t i = 0; i < kReplaced; ++i) {
    std::string changed = input;
    const uint64_t random = Mix64(input.size() * kReplaced + i);
    changed[random % input.size()] = static_cast<char>(random >> 32);
    Run(changed);
  }
}

int Main(int argc, char** argv) {
  SetLogLevel(Severity::kError);  // harmless warnings would be most of the output
  absl::string_view folder = argc == 2 ? argv[1] : "";
  if (!absl::ConsumePrefix(&folder, "--corpus=")) {
    std::fprintf(stderr, "usage: %s --corpus=DIR\n", argv[0]);
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(folder))) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::fprintf(stderr, "%s\n", file.c_str());
    std::ifstream in(file, std::ios::binary);
    RunChanges(std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()));
  }
  std::fprintf(stderr, "%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) { return lockstep::Main(argc, argv); }
