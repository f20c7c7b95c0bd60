#include "tools/bench/cublas_lt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <utility>

#include "kernels/base/check.h"

namespace lockstep {
namespace bench {

struct CublasLt::Impl {
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  cublasLtHandle_t handle;
};

CublasLt::CublasLt(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CublasLt::~CublasLt() = default;

std::unique_ptr<CublasLt> CublasLt::Open() {
  void* library = dlopen("libcublasLt.so.13", RTLD_NOW);
  if (library == nullptr) library = dlopen("/usr/local/cuda/lib64/libcublasLt.so.13", RTLD_NOW);
  if (library == nullptr) return nullptr;
  auto impl = std::make_unique<Impl>();
  const auto load = [&](auto* to, const char* name) {
    *reinterpret_cast<void**>(to) = dlsym(library, name);
    CHECK(*to != nullptr) << name << " is not in libcublasLt ";
  };
  decltype(&cublasLtCreate) create = nullptr;
  load(&create, "cublasLtCreate");
  load(&impl->matmul, "cublasLtMatmul");
  load(&impl->heuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(&impl->desc_create, "cublasLtMatmulDescCreate");
  load(&impl->desc_set, "cublasLtMatmulDescSetAttribute");
  load(&impl->layout_create, "cublasLtMatrixLayoutCreate");
  load(&impl->preference_create, "cublasLtMatmulPreferenceCreate");
  load(&impl->preference_set, "cublasLtMatmulPreferenceSetAttribute");
  CHECK_EQ(create(&impl->handle), CUBLAS_STATUS_SUCCESS);
  return std::unique_ptr<CublasLt>(new CublasLt(std::move(impl)));
}

std::vector<CublasLt::Run> CublasLt::Algorithms(int64_t n, int64_t k, int64_t m, void* workspace,
                                                int64_t workspace_bytes) {
  // Column-major: out^T [n, m] = w [n, k] x^T, with w stored as its transpose.
  cublasLtMatmulDesc_t desc;
  CHECK_EQ(impl_->desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  CHECK_EQ(impl_->desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
           CUBLAS_STATUS_SUCCESS);
  cublasLtMatrixLayout_t w_layout, x_layout, out_layout;
  const auto rows = [](int64_t v) { return static_cast<uint64_t>(v); };
  CHECK_EQ(impl_->layout_create(&w_layout, CUDA_R_16BF, rows(k), rows(n), k),
           CUBLAS_STATUS_SUCCESS);
  CHECK_EQ(impl_->layout_create(&x_layout, CUDA_R_16BF, rows(k), rows(m), k),
           CUBLAS_STATUS_SUCCESS);
  CHECK_EQ(impl_->layout_create(&out_layout, CUDA_R_32F, rows(n), rows(m), n),
           CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulPreference_t preference;
  CHECK_EQ(impl_->preference_create(&preference), CUBLAS_STATUS_SUCCESS);
  const auto limit = static_cast<size_t>(workspace_bytes);
  CHECK_EQ(impl_->preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit,
                                 sizeof limit),
           CUBLAS_STATUS_SUCCESS);
  cublasLtMatmulHeuristicResult_t results[8];
  int count = 0;
  CHECK_EQ(impl_->heuristic(impl_->handle, desc, w_layout, x_layout, out_layout, out_layout,
                            preference, 8, results, &count),
           CUBLAS_STATUS_SUCCESS);
  std::vector<Run> runs;
  for (int i = 0; i < count; ++i) {
    const cublasLtMatmulAlgo_t algo = results[i].algo;
    Impl* impl = impl_.get();
    runs.push_back([=](const void* w, const void* x, void* out, void* stream) {
      const float one = 1.0f, zero = 0.0f;
      CHECK_EQ(
          impl->matmul(impl->handle, desc, &one, w, w_layout, x, x_layout, &zero, out, out_layout,
                       out, out_layout, &algo, workspace, limit, static_cast<cudaStream_t>(stream)),
          CUBLAS_STATUS_SUCCESS);
    });
  }
  return runs;
}

}  // namespace bench
}  // namespace lockstep
