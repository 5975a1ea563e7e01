// What is exchanged and what is computed while the schemes are measured: lists of tensors shaped like the
// gradients of a network, and a small network to train. Holds no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/gradient_bucketer.h>

namespace collectives {

// One size to measure.
struct ExchangeSize {
  int64_t elements;
  int64_t tensors;  // even: half of them matrices, half biases of 1/256 of a matrix
};

// The lengths of the tensors, `size.elements` in all.
std::vector<int64_t> tensor_lengths(const ExchangeSize& size);

// fp32 gradients of one rank, twice: as a plain list for the first five schemes, and as the gradients of
// parameters that a GradientBucketer watches.
class Gradients {
 public:
  Gradients(const std::shared_ptr<pacer::Communicator>& world, const ExchangeSize& size);

  std::vector<at::Tensor>& plain() { return plain_; }
  pacer::GradientBucketer& bucketer() { return *bucketer_; }
  // All of them 1, so that sums of sums do not overflow.
  void reset();
  // The bucketer's gradients, to be filled and read.
  std::vector<at::Tensor> bucketed() const;

 private:
  std::vector<at::Tensor> plain_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<pacer::GradientBucketer> bucketer_;
};

// x + W2 gelu(W1 norm(x)), `layers` times, and the mean of the squares: the MLP half of a transformer. Where
// `layer_seconds` is not 0, each layer also sleeps: so long in forward and twice as long in backward, as the
// host of an accelerator that does the work. Its processor is free meanwhile.
class ResidualMlpImpl : public torch::nn::Module {
 public:
  ResidualMlpImpl(int64_t layers, int64_t width, double layer_seconds = 0);
  // x: [rows, width] to a scalar.
  at::Tensor loss(const at::Tensor& x);

  int64_t elements() const;  // of all parameters
  std::vector<std::pair<std::string, at::Tensor>> named() const;
  std::vector<at::Tensor> gradients() const;

 private:
  double layer_seconds_;
  std::vector<torch::nn::LayerNorm> norms_;
  std::vector<torch::nn::Linear> inputs_, outputs_;
};
TORCH_MODULE(ResidualMlp);

}  // namespace collectives
