// Implementation of the module names and patterns of quantization configs.
#include "models/quant/module_matcher.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/base/status_macros.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace lockstep {
namespace {

constexpr uint32_t kMatchLimit = 200000;
constexpr const char* kPrefixes[] = {"model.language_model.",    "language_model.model.",
                                     "language_model.backbone.", "model.",
                                     "language_model.",          "backbone."};

struct FusedName {
  const char* fused;
  std::vector<std::string> members;
};

const std::vector<FusedName>& FusedNames() {
  static const auto* const names = new std::vector<FusedName>{
      {"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
      {"gate_up_proj", {"gate_proj", "up_proj"}},
      {"in_proj_qkvz", {"in_proj_qkv", "in_proj_z"}},
      {"in_proj_ba", {"in_proj_b", "in_proj_a"}},
  };
  return *names;
}

std::string LastPart(const std::string& name) { return name.substr(name.rfind('.') + 1); }

// The names that a config may use for the module: its own, and those with the other prefixes when
// it has one itself (or is the head, which the text part of a wrapper holds).
std::vector<std::string> Aliases(const std::string& module) {
  std::vector<std::string> names = {module};
  const std::string canonical = CanonicalModule(module);
  if (canonical == "lm_head") names.push_back(canonical);
  if (canonical == module && canonical != "lm_head") return names;
  for (const char* prefix : kPrefixes) {
    const std::string alias = absl::StrCat(prefix, canonical);
    if (alias != module) names.push_back(alias);
  }
  return names;
}

bool GlobMatchesOne(const std::string& pattern, const std::string& name) {
  size_t p = 0, n = 0, star = std::string::npos, resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace

std::string CanonicalModule(const std::string& module) {
  absl::string_view name = module;
  while (absl::ConsumePrefix(&name, "model.") || absl::ConsumePrefix(&name, "language_model.") ||
         absl::ConsumePrefix(&name, "backbone.")) {
  }
  return std::string(name);
}

bool NamesModule(const std::string& entry, const std::string& module) {
  const std::string a = CanonicalModule(entry);
  const std::string b = CanonicalModule(module);
  if (a == b) return true;
  const std::string fused = LastPart(a);
  const std::string member = LastPart(b);
  if (a.substr(0, a.size() - fused.size()) != b.substr(0, b.size() - member.size())) return false;
  for (const FusedName& name : FusedNames()) {
    if (fused != name.fused) continue;
    return std::find(name.members.begin(), name.members.end(), member) != name.members.end();
  }
  return false;
}

bool IsLinearModule(const std::string& module) {
  const std::string last = LastPart(module);
  return last != "embed_tokens" && last != "embeddings" && last != "conv1d" &&
         !absl::EndsWith(last, "norm");
}

bool GlobMatches(const std::string& pattern, const std::string& module) {
  const std::vector<std::string> names = Aliases(module);
  return std::any_of(names.begin(), names.end(),
                     [&pattern](const std::string& name) { return GlobMatchesOne(pattern, name); });
}

struct ModulePattern::Regex {
  ~Regex() {
    pcre2_match_context_free(context);
    pcre2_code_free(code);
  }
  pcre2_code* code = nullptr;
  pcre2_match_context* context = nullptr;
};

ModulePattern::ModulePattern() = default;
ModulePattern::ModulePattern(ModulePattern&&) noexcept = default;
ModulePattern& ModulePattern::operator=(ModulePattern&&) noexcept = default;
ModulePattern::~ModulePattern() = default;

absl::StatusOr<ModulePattern> ModulePattern::Parse(const std::string& entry) {
  ModulePattern pattern;
  pattern.entry_ = entry;
  absl::string_view expression = entry;
  if (!absl::ConsumePrefix(&expression, "re:")) return pattern;
  int error = 0;
  PCRE2_SIZE offset = 0;
  pattern.regex_ = std::make_unique<Regex>();
  pattern.regex_->code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                    PCRE2_ANCHORED | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (pattern.regex_->code == nullptr) {
    PCRE2_UCHAR text[256] = {0};
    pcre2_get_error_message(error, text, sizeof text);
    return absl::InvalidArgumentError(absl::StrCat("quantization_config: the regular expression \"",
                                                   expression, "\" is invalid at offset ", offset,
                                                   ": ", reinterpret_cast<const char*>(text)));
  }
  pattern.regex_->context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(pattern.regex_->context, kMatchLimit);
  return pattern;
}

absl::StatusOr<bool> ModulePattern::Matches(const std::string& module) const {
  if (regex_ == nullptr) {
    if (entry_ == "Linear") return IsLinearModule(module);
    return NamesModule(entry_, module);
  }
  for (const std::string& name : Aliases(module)) {
    pcre2_match_data* data = pcre2_match_data_create_from_pattern(regex_->code, nullptr);
    const int rc = pcre2_match(regex_->code, reinterpret_cast<PCRE2_SPTR>(name.data()), name.size(),
                               0, 0, data, regex_->context);
    pcre2_match_data_free(data);
    if (rc >= 0) return true;
    if (rc != PCRE2_ERROR_NOMATCH) {
      return absl::InvalidArgumentError(
          absl::StrCat("quantization_config: \"", entry_, "\" cannot be matched against module ",
                       name, " (PCRE2 error ", rc, "): simplify the expression"));
    }
  }
  return false;
}

ExcludeList::ExcludeList(std::vector<std::string> entries, const std::set<std::string>& modules) {
  for (std::string& entry : entries) {
    if (entry.empty()) continue;
    if (entry.find('*') != std::string::npos) {
      globs_.push_back(std::move(entry));
      continue;
    }
    if (modules.count(CanonicalModule(entry)) == 0) substrings_.push_back(CanonicalModule(entry));
    exact_.push_back(std::move(entry));
  }
}

bool ExcludeList::Excludes(const std::string& module) const {
  const auto matches = [&module](const std::string& entry) { return NamesModule(entry, module); };
  if (std::any_of(exact_.begin(), exact_.end(), matches)) return true;
  const auto glob = [&module](const std::string& entry) { return GlobMatches(entry, module); };
  if (std::any_of(globs_.begin(), globs_.end(), glob)) return true;
  const std::string canonical = CanonicalModule(module);
  return std::any_of(substrings_.begin(), substrings_.end(), [&canonical](const std::string& s) {
    return !s.empty() && canonical.find(s) != std::string::npos;
  });
}

}  // namespace lockstep
