// LibTorch's global settings: threads and the arithmetic of matrix products.
#include "machine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

#include "machine_name.h"

namespace convergence {

Machine prepare_machine(const Settings& settings) {
  const bool has_cuda = torch::cuda::is_available();
  pacer::require(settings.device != "cuda" || has_cuda,
                 "--device cuda: no CUDA device can be used here; --device cpu always works");
  const bool use_cuda = settings.device != "cpu" && has_cuda;
  pacer::require(settings.precision != "tensorfloat32" || use_cuda,
                 "--precision tensorfloat32 needs a CUDA device; on the CPU take float32 or bfloat16");
  at::globalContext().setAllowTF32CuBLAS(settings.precision == "tensorfloat32");
  if (settings.threads > 0) torch::set_num_threads(static_cast<int>(settings.threads));
  if (!use_cuda) {
    const int threads = at::get_num_threads();
    return {"cpu",
            processor_name() + ", " + std::to_string(threads) + (threads == 1 ? " thread" : " threads")};
  }
  return {"cuda", graphics_name()};
}

}  // namespace convergence
