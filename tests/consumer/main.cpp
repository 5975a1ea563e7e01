// The smallest user of an installed pacer: one step of FusedAdamW, compared with the formula.
#include <cmath>
#include <cstdio>

#include <torch/types.h>

#include <pacer/pacer.h>

int main() {
  torch::Tensor weight = torch::ones({3}, torch::requires_grad());
  pacer::FusedAdamW optimizer(std::vector<torch::Tensor>{weight},
                              pacer::FusedAdamWOptions(0.1).weight_decay(0.5));
  (weight * weight).sum().backward();
  optimizer.step();
  const double expected = 1 - 0.1 * 0.5 - 0.1;  // decay, then a first step of lr against the gradient's sign
  const double found = weight[0].item<double>();
  std::printf("weight %.6f, expected %.6f\n", found, expected);
  return std::abs(found - expected) < 1e-6 ? 0 : 1;
}
