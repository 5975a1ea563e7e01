// The smallest user of an installed pacer: one step of FusedAdamW, compared with the formula. With ALL_OF_PACER it includes
// every public header, which takes four times as long.
#include <cmath>
#include <cstdio>

#include <ATen/ops/ones.h>
#ifdef ALL_OF_PACER
#include <pacer/pacer.h>
#else
#include <pacer/optimizers/fused_adam.h>
#endif

int main() {
  at::Tensor weight = at::ones({3}).requires_grad_();
  pacer::FusedAdamW optimizer(std::vector<at::Tensor>{weight},
                              pacer::FusedAdamWOptions(0.1).weight_decay(0.5));
  weight.mul(weight).sum().backward();
  optimizer.step();
  const double expected = 1 - 0.1 * 0.5 - 0.1;  // decay, then a first step of lr against the gradient's sign
  const double found = weight[0].item<double>();
  std::printf("weight %.6f, expected %.6f\n", found, expected);
  return std::abs(found - expected) < 1e-6 ? 0 : 1;
}
