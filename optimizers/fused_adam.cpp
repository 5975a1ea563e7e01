#include <pacer/optimizers/fused_adam.h>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include <pacer/optimizers/detail/optimizer_archive.h>

namespace pacer {

void FusedAdam::take_over(const torch::optim::Adam& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::AdamParamState>(source, view()));
}

void FusedAdamW::take_over(const torch::optim::AdamW& source) {
  restore(detail::copy_of_torch_optimizer<torch::optim::AdamWParamState>(source, view()));
}

}  // namespace pacer
