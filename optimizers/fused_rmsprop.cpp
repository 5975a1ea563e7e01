#include <pacer/optimizers/fused_rmsprop.h>

#include <torch/optim/rmsprop.h>

#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer {

void FusedRmsprop::take_over(const torch::optim::RMSprop& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::RMSpropParamState>(source, view()));
}

}  // namespace pacer
