#include "worker/probe_linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/base/hash.h"
#include "kernels/base/status_macros.h"
#include "kernels/runtime/device_buffer.h"
#include "kernels/runtime/device_memory.h"
#include "kernels/runtime/device_stream.h"

namespace lockstep {
namespace {

// Steps never have this number, so a probe cannot be taken for one.
constexpr uint64_t kProbeStep = ~uint64_t{0};

// The bytes of a contiguous tensor, once the work queued so far has ended.
absl::StatusOr<std::string> Bytes(ExecContext* ctx, const TensorView& view) {
  std::string bytes(static_cast<size_t>(view.bytes()), 0);
  RETURN_IF_ERROR(SynchronizeStream(ctx->device, ctx->stream));
  RETURN_IF_ERROR(CopyBytes(DeviceType::kCpu, bytes.data(), ctx->device, view.data, view.bytes()));
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
  const int64_t out_elements = request.tokens() * shard.local_n();
  const int64_t in_bytes = static_cast<int64_t>(local.size() * sizeof(float));
  ASSIGN_OR_RETURN(const DeviceBuffer in_buffer, DeviceBuffer::Allocate(ctx->device, in_bytes));
  ASSIGN_OR_RETURN(const DeviceBuffer out_buffer,
                   DeviceBuffer::Allocate(ctx->device, out_elements * 4));
  RETURN_IF_ERROR(
      CopyBytes(ctx->device, in_buffer.data(), DeviceType::kCpu, local.data(), in_bytes));
  const ConstTensorView x =
      in_buffer.View(DType::kF32, Shape{request.tokens(), shard.columns.size});
  const TensorView out = out_buffer.View(DType::kF32, Shape{request.tokens(), shard.local_n()});

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
      ASSIGN_OR_RETURN(*response.mutable_quantized(), Bytes(ctx, quantized->codes));
      if (quantized->scales.shape.rank() > 0 && quantized->scales.data != nullptr) {
        ASSIGN_OR_RETURN(*response.mutable_scales(), Bytes(ctx, quantized->scales));
      }
      return absl::OkStatus();
    }
    return shard.row_parallel ? linear->ApplyReduce(ctx, comm, &linear_input, out)
                              : linear->Apply(ctx, &linear_input, out);
  };
  Workspace counting(ctx->device);
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
  ASSIGN_OR_RETURN(*response.mutable_output(), Bytes(ctx, out));
  const size_t moved =
      response.output().size() + response.quantized().size() + response.scales().size();
  ctx->counters->Add(Traffic::kDiagnosticsToHost, static_cast<int64_t>(moved));
  return response;
}

}  // namespace lockstep
