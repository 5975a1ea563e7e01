// Rotary positions (Su et al., "RoFormer", arXiv:2104.09864): pairs of channels of queries and keys turn by an
// angle that grows with the position, so that attention sees how far two tokens are apart.
//
//   pacer::modules::TransformerLayerOptions(768, 12).causal(true).rotary(10'000)    in a fused layer
//   const auto [q, k] = pacer::modules::rotary(q_of_x, k_of_x, positions);           before another attention
//
// Pairs are the channels i and i + head_dim / 2, as in the weights of Llama and Qwen that are published for
// transformers; weights whose pairs are neighbours have their rows in another order.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

namespace pacer::modules {

// How Llama 3.1 and later ones see further than they were trained at first (the rope_scaling "llama3" of their published
// folders; arXiv:2407.21783): pairs that make fewer than low_frequency_factor turns in original_length positions turn factor
// times more slowly, those that make more than high_frequency_factor turns as before, and the others in between, linearly
// in their turns.
struct RotaryScaling {
  // How many times more slowly pairs of few turns go, >= 1; 32 in Llama 3.2.
  TORCH_ARG(double, factor) = 8;
  // Turns below which a pair goes so, > 0.
  TORCH_ARG(double, low_frequency_factor) = 1;
  // Turns above which a pair goes as before, > low_frequency_factor.
  TORCH_ARG(double, high_frequency_factor) = 4;
  // The positions of the first training, >= 1.
  TORCH_ARG(int64_t, original_length) = 8192;
};

// A shared handle: copies have the same tables of angles and the same offset, so give all layers of a model the same
// one.
class Rotary {
 public:
  // Pair i turns by theta^(-2 i / head_dim) radians a position. Throws InvalidArgument where theta is not above 0
  // and finite.
  Rotary(double theta = 10'000);
  // The same with frequencies scaled. Throws InvalidArgument where the scaling's numbers are not as said there.
  Rotary(double theta, const RotaryScaling& scaling);
  // Pair i turns by frequencies[i] radians a position, for models whose frequencies are scaled; head_dim is twice
  // as many. Throws InvalidArgument for none, and for one that is not finite.
  explicit Rotary(std::vector<double> frequencies);

  // The position of the first token of every sequence; 0 in a new one. A region that is recomputed in backward
  // (pacer/modules/recompute.h) sees that of its forward. set_offset throws InvalidArgument below 0.
  int64_t offset() const;
  void set_offset(int64_t offset);

  // Cosines and sines, fp32 [sequence, head_dim / 2] each, rounded from fp64.
  struct Angles {
    at::Tensor cosines, sines;
  };
  // Returns the angles of `sequence` positions from offset() on. Tables are made on the CPU when a position beyond
  // them is asked for, and are kept on each device. Throws InvalidArgument for a head_dim that is odd, below 2 or no
  // twice of the frequencies, and Error where a table would have to be made while a CUDA graph is captured.
  Angles angles(int64_t sequence, int64_t head_dim, const at::Device& device) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Returns q and k turned by their positions: new tensors, from q [batch, heads, sequence, head_dim] and k, which
// may have other heads, in Float, BFloat16 or Half. Everything is fp32 and rounded once. Backward turns gradients
// back. Throws InvalidArgument for other shapes and dtypes; on a GPU head_dim must be a multiple of 16. No second
// derivative.
std::pair<at::Tensor, at::Tensor> rotary(const at::Tensor& q, const at::Tensor& k, const Rotary& positions);

}  // namespace pacer::modules
