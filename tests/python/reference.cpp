// Steps of C++ for tests/python/test_optimizers.py: parameters and gradients by a formula that is exact in
// fp32, so that Python computes the same ones.
//
//   pacer-python-reference OPTIMIZER DTYPE FILE   writes the parameters after five steps
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include <torch/torch.h>

#include <pacer/optimizers/optimizers.h>

namespace {

torch::Tensor numbers(int64_t count, int64_t salt, torch::ScalarType dtype) {
  const auto index = torch::arange(count, torch::kInt64);
  return (((index * 7919 + salt * 104729) % 2001 - 1000).to(torch::kFloat) / 1024).to(dtype);
}

template <class Optimizer, class Options>
std::unique_ptr<torch::optim::Optimizer> make(const std::vector<torch::Tensor>& parameters) {
  return std::make_unique<Optimizer>(parameters, Options(0.01).weight_decay(0.1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const std::string name = argv[1];
  const auto dtype = std::string(argv[2]) == "bf16" ? torch::kBFloat16 : torch::kFloat;
  const std::vector<int64_t> sizes = {1, 7, 1000, 5000};
  std::vector<torch::Tensor> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back(numbers(sizes[i], static_cast<int64_t>(i), dtype).requires_grad_());
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (name == "FusedAdam") optimizer = make<pacer::FusedAdam, pacer::FusedAdamOptions>(parameters);
  if (name == "FusedAdamW") optimizer = make<pacer::FusedAdamW, pacer::FusedAdamWOptions>(parameters);
  if (name == "FusedLamb") optimizer = make<pacer::FusedLamb, pacer::FusedLambOptions>(parameters);
  for (int64_t step = 0; step < 5; ++step) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      parameters[i].mutable_grad() = numbers(sizes[i], 100 * (step + 1) + static_cast<int64_t>(i), dtype);
    }
    optimizer->param_groups()[0].options().set_lr(0.01 / static_cast<double>(step + 1));
    optimizer->step();
  }
  const std::vector<char> bytes = torch::pickle_save(torch::cat(parameters).detach());
  std::ofstream(argv[3], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return 0;
}
