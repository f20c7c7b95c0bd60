// How entries of quantization configs name modules: exact names under any of the usual prefixes,
// fused names, globs, regular expressions and class names. Immutable after creation; thread safe.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace lockstep {

// The name without the leading "model." and "language_model." parts, in any order:
// "model.language_model.layers.0.mlp", "language_model.model.layers.0.mlp" and "model.layers.0.mlp"
// are one module, "layers.0.mlp".
std::string CanonicalModule(const std::string& module);

// Same module, or `entry` is a fused name of which `module` is a member: qkv_proj, gate_up_proj,
// in_proj_qkvz, in_proj_ba.
bool NamesModule(const std::string& entry, const std::string& module);

// What the class name "Linear" covers: everything but embeddings, convolutions and norms.
bool IsLinearModule(const std::string& module);

// `pattern` with * (any characters) and ? (one) against the whole name, under any of its prefixes.
bool GlobMatches(const std::string& pattern, const std::string& module);

// One entry of `targets` or `ignore` of compressed-tensors: "re:<regex>" matches anchored at the
// start, as a prefix; "Linear" is the class name; anything else is an exact name.
class ModulePattern {
 public:
  // InvalidArgument, with the regex, its error and the offset, when it does not compile.
  static absl::StatusOr<ModulePattern> Parse(const std::string& entry);
  ModulePattern(ModulePattern&&) noexcept;
  ModulePattern& operator=(ModulePattern&&) noexcept;
  ~ModulePattern();

  // InvalidArgument when the regex takes too many steps on this name.
  absl::StatusOr<bool> Matches(const std::string& module) const;

 private:
  struct Regex;
  ModulePattern();
  std::string entry_;
  std::unique_ptr<Regex> regex_;  // null: name or class name
};

// An exclude list of ModelOpt: exact names, globs, and legacy substrings. An entry without * is a
// substring only when it is the exact name of no module in `modules` (canonical names): "mlp.gate"
// of a router must not swallow mlp.gate_proj.
class ExcludeList {
 public:
  ExcludeList() = default;
  ExcludeList(std::vector<std::string> entries, const std::set<std::string>& modules);
  bool Excludes(const std::string& module) const;

 private:
  std::vector<std::string> exact_;
  std::vector<std::string> globs_;
  std::vector<std::string> substrings_;
};

}  // namespace lockstep
