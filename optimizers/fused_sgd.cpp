#include <pacer/optimizers/fused_sgd.h>

#include <torch/optim/sgd.h>

#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer {

void FusedSgd::take_over(const torch::optim::SGD& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::SGDParamState>(source, view()));
}

}  // namespace pacer
