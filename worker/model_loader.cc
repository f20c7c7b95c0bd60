#include "worker/model_loader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/base/status_macros.h"
#include "models/model_config.h"
#include "models/quant/scheme.h"
#include "models/weights/checkpoint.h"
#include "models/weights/weight_store.h"

namespace lockstep {
namespace {

using worker::v1::LoadModelProgress;

// What a loaded model keeps pointing to.
struct Resources {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<WeightStore> store;
};

LoadModelProgress ToProto(const LoadProgress& load, absl::Duration elapsed) {
  LoadModelProgress progress;
  progress.set_phase("load");
  progress.set_bytes_done(load.bytes_done);
  progress.set_bytes_total(load.bytes_total);
  progress.set_current(load.current);
  const double seconds = std::max(1e-3, absl::ToDoubleSeconds(elapsed));
  const double rate = static_cast<double>(load.bytes_done) / seconds;
  progress.set_gb_per_second(rate * 1e-9);
  if (rate > 0) {
    const int64_t rest = std::max<int64_t>(0, load.bytes_total - load.bytes_done);
    progress.set_eta_seconds(static_cast<double>(rest) / rate);
  }
  return progress;
}

void FillResult(const ModelConfig& config, const TpLegality& legality, const std::string& scheme,
                const Model& model, const WeightStore& store, worker::v1::LoadModelResult* result) {
  result->set_shard_digest(store.shard_digest());
  for (const auto& item : store.bytes_by_class()) {
    worker::v1::BytesOfClass* bytes = result->add_bytes();
    bytes->set_format(item.first.format);
    bytes->set_module_class(item.first.module_class);
    bytes->set_resident_bytes(item.second.resident);
    bytes->set_checkpoint_bytes(item.second.checkpoint);
  }
  result->set_resident_bytes(store.total().resident);
  result->set_checkpoint_bytes(store.total().checkpoint);
  result->set_architecture(config.model_type);
  result->set_quantization(scheme);
  result->set_vocab_size(model.vocab_size());
  result->set_max_positions(config.max_position_embeddings);
  for (const int32_t id : config.eos_token_ids) result->add_eos_token_ids(id);
  for (const int tp : legality.legal) result->add_legal_tp(tp);
  result->set_kv_block_bytes(model.cache_spec().BytesPerKvBlock());
  result->set_slot_bytes(model.cache_spec().BytesPerSlot());
  result->set_snapshot_bytes(model.cache_spec().BytesPerSnapshot());
}

// Broken values are found by the loaders of single tensors; all of them mean a broken checkpoint.
absl::Status WithReason(const absl::Status& status) {
  if (!absl::IsDataLoss(status) || absl::StartsWith(status.message(), "CHECKPOINT_")) return status;
  return absl::DataLossError(absl::StrCat("CHECKPOINT_INVALID: ", status.message()));
}

// The resolver's words, and the formats that weights really have where the config says nothing of
// them.
std::string Describe(const SchemeResolver& resolver, const WeightStore& store) {
  const std::string summary = resolver.Summary();
  std::string formats;
  for (const auto& item : store.bytes_by_class()) {
    const std::string& format = item.first.format;
    if (format == "bf16" || format == "f32" || absl::StrContains(summary, format) ||
        absl::StrContains(formats, format)) {
      continue;
    }
    absl::StrAppend(&formats, formats.empty() ? "" : " + ", format);
  }
  return formats.empty() ? summary : absl::StrCat(summary, "; by their tensors: ", formats);
}

}  // namespace

absl::StatusOr<LoadedModel> LoadCheckpointModel(const LoadSpec& spec, Counters* counters,
                                                const LoadProgressFn& progress) {
  LoadModelProgress opening;
  opening.set_phase("open");
  opening.set_current(spec.path);
  progress(opening);
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(spec.path));
  ASSIGN_OR_RETURN(const TpLegality legality, LegalTpSizes(config));
  RETURN_IF_ERROR(legality.Check(spec.world));
  auto resources = std::make_shared<Resources>();
  ASSIGN_OR_RETURN(resources->checkpoint, Checkpoint::Open(spec.path));
  const uint64_t digest = resources->checkpoint->digest();
  if (spec.expected_digest != 0 && spec.expected_digest != digest) {
    return absl::FailedPreconditionError(absl::StrCat(spec.path, ": the checkpoint has digest ",
                                                      absl::Hex(digest), ", expected ",
                                                      absl::Hex(spec.expected_digest)));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<SchemeResolver> resolver,
                   SchemeResolver::Create(config.root, *resources->checkpoint));
  const absl::Time start = absl::Now();
  resources->store = std::make_unique<WeightStore>(
      resources->checkpoint.get(), spec.device, spec.rank, spec.world, counters,
      [&](const LoadProgress& load) { progress(ToProto(load, absl::Now() - start)); });
  LoadedModel loaded;
  auto model = LoadModel(config, spec.options, *resolver, resources->store.get());
  if (!model.ok()) return WithReason(model.status());
  loaded.model = *std::move(model);
  FillResult(config, legality, Describe(*resolver, *resources->store), *loaded.model,
             *resources->store, &loaded.result);
  loaded.model_digest = digest;
  loaded.resources = std::move(resources);
  return loaded;
}

}  // namespace lockstep
