#include "worker/probe_linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"

namespace lockstep {
namespace {

// Steps never have this number, so a probe cannot be taken for one.
constexpr uint64_t kProbeStep = ~uint64_t{0};

std::string Bytes(const TensorView& view) {
  std::string bytes;
  const int64_t row_bytes = view.RowElements() * SizeOf(view.dtype);
  for (int64_t r = 0; r < view.rows(); ++r) {
    bytes.append(static_cast<const char*>(view.data) + r * view.row_stride * SizeOf(view.dtype),
                 static_cast<size_t>(row_bytes));
  }
  return bytes;
}

}  // namespace

absl::StatusOr<worker::v1::ProbeLinearResponse> RunProbeLinear(
    ExecContext* ctx, const Model& model, CommGroup* comm,
    const worker::v1::ProbeLinearRequest& request) {
  const Linear* linear = model.FindLinear(request.module());
  if (linear == nullptr) {
    return absl::NotFoundError(absl::StrCat("the model has no linear \"", request.module(), "\""));
  }
  const LinearShard& shard = linear->resident().shard();
  if (request.tokens() < 1 ||
      static_cast<int64_t>(request.input().size()) != request.tokens() * shard.k * 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.module(), ": input has ", request.input().size(), " bytes, F32 [",
                     request.tokens(), ", ", shard.k, "] was expected"));
  }
  std::vector<float> input(static_cast<size_t>(request.tokens() * shard.k));
  std::copy_n(request.input().data(), request.input().size(),
              reinterpret_cast<char*>(input.data()));
  std::vector<float> local(static_cast<size_t>(request.tokens() * shard.columns.size));
  for (int64_t t = 0; t < request.tokens(); ++t) {
    std::copy_n(input.begin() + t * shard.k + shard.columns.begin, shard.columns.size,
                local.begin() + t * shard.columns.size);
  }
  const ConstTensorView x(local.data(), DType::kF32, Shape{request.tokens(), shard.columns.size});
  std::vector<float> output(static_cast<size_t>(request.tokens() * shard.local_n()));
  const TensorView out(output.data(), DType::kF32, Shape{request.tokens(), shard.local_n()});

  worker::v1::ProbeLinearResponse response;
  const auto run = [&](Workspace* workspace, bool quantize) -> absl::Status {
    ctx->workspace = workspace;
    Workspace::Scope scope(workspace);
    LinearInput linear_input(x);
    if (quantize) {
      auto quantized = linear->resident().QuantizeInput(ctx, &linear_input);
      if (absl::IsFailedPrecondition(quantized.status())) return absl::OkStatus();
      RETURN_IF_ERROR(quantized.status());
      if (ctx->dry_run()) return absl::OkStatus();
      response.set_quantized(Bytes(quantized->codes));
      if (quantized->scales.shape.rank() > 0 && quantized->scales.data != nullptr) {
        response.set_scales(Bytes(quantized->scales));
      }
      return absl::OkStatus();
    }
    return shard.row_parallel ? linear->ApplyReduce(ctx, comm, &linear_input, out)
                              : linear->Apply(ctx, &linear_input, out);
  };
  Workspace counting;
  RETURN_IF_ERROR(run(&counting, true));
  RETURN_IF_ERROR(run(&counting, false));
  Workspace workspace;
  RETURN_IF_ERROR(workspace.Allocate(ctx->device, counting.peak()));
  comm->BeginStep(kProbeStep, HashBytes(request.module()));
  RETURN_IF_ERROR(run(&workspace, true));
  RETURN_IF_ERROR(run(&workspace, false));

  response.set_local_n(shard.local_n());
  response.set_row_begin(shard.rows.empty() ? 0 : shard.rows.front().begin);
  for (const Range& range : shard.rows) {
    response.add_rows(range.begin);
    response.add_rows(range.size);
  }
  response.set_column_begin(shard.columns.begin);
  response.set_columns(shard.columns.size);
  response.set_row_parallel(shard.row_parallel);
  response.set_output(Bytes(out));
  const size_t moved =
      response.output().size() + response.quantized().size() + response.scales().size();
  ctx->counters->Add(Traffic::kDiagnosticsToHost, static_cast<int64_t>(moved));
  return response;
}

}  // namespace lockstep
