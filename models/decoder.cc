#include "models/decoder.h"

#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status_macros.h"
#include "kernels/rows/rows.h"

namespace lockstep {
namespace {

// Tensors of a release that a text model has no use for. Their values are not looked at.
bool IsUnusedByText(const std::string& name) {
  for (absl::string_view prefix : {"model.visual.", "visual.", "mtp.", "model.mtp."}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  for (absl::string_view suffix :
       {".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".input_scale", ".input_global_scale"}) {
    if (absl::EndsWith(name, suffix)) return true;
  }
  return absl::EndsWith(name, ".rotary_emb.inv_freq");
}

}  // namespace

class DecoderBuilder::Decoder : public Model {
 public:
  Decoder(const DecoderConfig& config, DType activation_dtype)
      : config_(config), dtype_(activation_dtype) {
    cache_spec_.kv_dtype = activation_dtype;
  }

  const CacheSpec& cache_spec() const override { return cache_spec_; }
  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t local_vocab_rows() const override { return head_.shard().rows_per_rank; }
  absl::Status Forward(ExecContext* ctx, CommGroup* comm, const ForwardBatch& batch,
                       const CacheViews& caches, TensorView logits) const override;
  const Linear* FindLinear(const std::string& module) const override {
    const auto it = linears_.find(WithoutPrefix(module));
    return it == linears_.end() ? nullptr : it->second;
  }

 private:
  friend class DecoderBuilder;
  struct Layer {
    TensorView norm;  // before the block
    std::unique_ptr<Block> block;
  };

  // Releases differ in the prefix of the text part; without it the same module has one name.
  std::string WithoutPrefix(const std::string& module) const {
    for (const std::string& prefix : config_.names.prefixes) {
      if (absl::StartsWith(module, prefix)) return module.substr(prefix.size());
    }
    return module;
  }
  void AddLinear(const Linear& linear) {
    linears_[WithoutPrefix(linear.resident().shard().module)] = &linear;
  }

  const DecoderConfig config_;
  const DType dtype_;
  CacheSpec cache_spec_;
  VocabEmbedding embedding_;
  VocabHead head_;
  std::vector<Layer> layers_;
  TensorView final_norm_;
  std::map<std::string, const Linear*> linears_;
};

absl::Status DecoderBuilder::Decoder::Forward(ExecContext* ctx, CommGroup* comm,
                                              const ForwardBatch& batch, const CacheViews& caches,
                                              TensorView logits) const {
  const int64_t tokens = batch.num_tokens, hidden = config_.hidden_size;
  Workspace::Scope step(ctx->workspace);
  TensorView h = ctx->workspace->Take(dtype_, {tokens, hidden});
  TensorView u = ctx->workspace->Take(dtype_, {tokens, hidden});
  TensorView sum = ctx->workspace->Take(DType::kF32, {tokens, hidden});
  RETURN_IF_ERROR(embedding_.Apply(ctx, comm, batch.tokens, h));
  RETURN_IF_ERROR(RmsNorm(ctx, h, layers_[0].norm, config_.norm, u));
  for (size_t l = 0; l < layers_.size(); ++l) {
    {
      Workspace::Scope scope(ctx->workspace);
      RETURN_IF_ERROR(layers_[l].block->Apply(ctx, comm, batch, caches, u, sum));
    }
    const TensorView next = l + 1 < layers_.size() ? layers_[l + 1].norm : final_norm_;
    RETURN_IF_ERROR(AddRmsNorm(ctx, h, sum, next, config_.norm, u));
  }
  if (batch.num_logits == 0) return absl::OkStatus();
  TensorView selected = ctx->workspace->Take(dtype_, {batch.num_logits, hidden});
  RETURN_IF_ERROR(GatherRows(ctx, u, batch.logit_rows, selected));
  return head_.Apply(ctx, selected, logits);
}

DecoderConfig DecoderConfig::Of(const ModelConfig& model, float norm_weight_offset) {
  DecoderConfig c;
  c.vocab_size = model.vocab_size;
  c.hidden_size = model.hidden_size;
  c.tied_head = model.tie_word_embeddings;
  c.norm = {static_cast<float>(model.NumberOr("rms_norm_eps", 1e-6)), norm_weight_offset};
  c.names.prefixes = {"model.language_model.", "language_model.model.", "model."};
  return c;
}

DecoderBuilder::DecoderBuilder() = default;
DecoderBuilder::DecoderBuilder(DecoderBuilder&&) noexcept = default;
DecoderBuilder::~DecoderBuilder() = default;

absl::StatusOr<DecoderBuilder> DecoderBuilder::Create(const DecoderConfig& config,
                                                      const ModelOptions& options,
                                                      const SchemeResolver& resolver,
                                                      WeightStore* store) {
  DecoderBuilder b;
  b.config_ = config;
  b.loader_ = {store, &resolver, options.activation_quant};
  b.model_ = std::make_unique<Decoder>(config, options.activation_dtype);
  const std::string embedding = config.names.embedding + ".weight";
  for (const std::string& candidate : config.names.prefixes) {
    if (store->checkpoint().Find(candidate + embedding) == nullptr) continue;
    b.prefix_ = candidate;
    RETURN_IF_ERROR(b.LoadVocabulary());
    return b;
  }
  return absl::DataLossError(absl::StrCat("CHECKPOINT_INVALID: ", store->checkpoint().directory(),
                                          ": no ", embedding, " under ",
                                          absl::StrJoin(config.names.prefixes, " or ")));
}

absl::Status DecoderBuilder::LoadVocabulary() {
  const int64_t vocab = config_.vocab_size, hidden = config_.hidden_size;
  const std::string embedding = prefix_ + config_.names.embedding;
  VocabHead& head = model_->head_;
  if (config_.tied_head) {
    ASSIGN_OR_RETURN(head, VocabHead::Load(loader_, embedding, vocab, hidden));
    model_->embedding_ = VocabEmbedding::Tied(&head);
    loader_.store->Allow(
        [](const std::string& name) { return absl::EndsWith(name, "lm_head.weight"); });
  } else {
    ASSIGN_OR_RETURN(model_->embedding_,
                     VocabEmbedding::Load(loader_.store, embedding + ".weight", vocab, hidden));
    // A wrapped model keeps its head inside the wrapper.
    const bool wrapped = absl::StartsWith(prefix_, "language_model.");
    ASSIGN_OR_RETURN(head, VocabHead::Load(loader_, wrapped ? "language_model.lm_head" : "lm_head",
                                           vocab, hidden));
  }
  if (head.shard().rows > 0) model_->AddLinear(head.linear());
  return absl::OkStatus();
}

BlockLoader DecoderBuilder::loader() { return {loader_, model_->dtype_, &model_->cache_spec_}; }

absl::Status DecoderBuilder::Add(const std::string& norm, std::unique_ptr<Block> block) {
  const int64_t hidden = config_.hidden_size;
  Decoder::Layer layer;
  ASSIGN_OR_RETURN(layer.norm, loader_.store->PlaceTensor(norm + ".weight", {hidden},
                                                          ShardSpec::Replicated(hidden), "norm"));
  layer.block = std::move(block);
  layer.block->ForEachLinear([this](const Linear& linear) { model_->AddLinear(linear); });
  model_->layers_.push_back(std::move(layer));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Model>> DecoderBuilder::Finish() {
  const int64_t hidden = config_.hidden_size;
  ASSIGN_OR_RETURN(model_->final_norm_,
                   loader_.store->PlaceTensor(prefix_ + config_.names.final_norm + ".weight",
                                              {hidden}, ShardSpec::Replicated(hidden), "norm"));
  loader_.store->Allow(IsUnusedByText);
  RETURN_IF_ERROR(loader_.store->CheckLeftovers());
  return std::unique_ptr<Model>(std::move(model_));
}

}  // namespace lockstep
