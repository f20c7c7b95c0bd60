#include "models/model.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "models/llama/llama.h"
#include "models/nemotron_h/nemotron_h.h"
#include "models/qwen3/qwen3.h"
#include "models/qwen3_5/qwen3_5.h"
#include "models/qwen3_5_moe/qwen3_5_moe.h"

namespace lockstep {
namespace {

struct Architecture {
  const char* model_type;  // of the text part
  absl::StatusOr<TpLegality> (*legal_tp)(const ModelConfig&);
  absl::StatusOr<std::unique_ptr<Model>> (*load)(const ModelConfig&, const ModelOptions&,
                                                 const SchemeResolver&, WeightStore*);
};

// Every architecture that this build serves: one row each.
constexpr Architecture kArchitectures[] = {
    {"llama", llama::LegalTpSizes, llama::Load},
    {"qwen3", qwen3::LegalTpSizes, qwen3::Load},
    {"qwen3_5_text", qwen3_5::LegalTpSizes, qwen3_5::Load},
    {"qwen3_5", qwen3_5::LegalTpSizes, qwen3_5::Load},
    {"nemotron_h", nemotron_h::LegalTpSizes, nemotron_h::Load},
    {"qwen3_5_moe_text", qwen3_5_moe::LegalTpSizes, qwen3_5_moe::Load},
    {"qwen3_5_moe", qwen3_5_moe::LegalTpSizes, qwen3_5_moe::Load},
};

absl::StatusOr<const Architecture*> Find(const ModelConfig& config) {
  std::vector<std::string> known;
  for (const Architecture& row : kArchitectures) {
    if (config.model_type == row.model_type) return &row;
    known.push_back(row.model_type);
  }
  return absl::UnimplementedError(
      absl::StrCat(config.directory, "/config.json: model_type \"", config.model_type,
                   "\" is not supported; supported: ", absl::StrJoin(known, ", ")));
}

}  // namespace

absl::StatusOr<TpLegality> LegalTpSizes(const ModelConfig& config) {
  const auto row = Find(config);
  if (!row.ok()) return row.status();
  auto legality = (*row)->legal_tp(config);
  if (legality.ok() && !config.ReadErrors().ok()) return config.ReadErrors();
  return legality;
}

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const ModelConfig& config,
                                                 const ModelOptions& options,
                                                 const SchemeResolver& resolver,
                                                 WeightStore* store) {
  const auto row = Find(config);
  if (!row.ok()) return row.status();
  ASSIGN_OR_RETURN(const TpLegality legality, LegalTpSizes(config));
  RETURN_IF_ERROR(legality.Check(store->world()));
  return (*row)->load(config, options, resolver, store);
}

}  // namespace lockstep
