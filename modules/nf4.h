// Weights of a model in 4 bits (NF4), for fine-tuning by adapters (lora.h) what would not fit
// otherwise: 4.127 bits an element with double quantisation, 4.5 without. They are frozen; products are of 16
// bits, or of 8 with Fp8Options::quantized_weights, of weights that are decoded for each.
//
//   pacer::modules::quantize(*model, pacer::modules::Nf4Options().targets({"*_proj"}));
#pragma once

#include <string>
#include <vector>

#include <torch/arg.h>
#include <torch/nn/module.h>

namespace pacer::modules {

struct Nf4Options {
  // Which layers; see matches_target in lora.h.
  TORCH_ARG(std::vector<std::string>, targets);
  // Scales of blocks are themselves kept in 8 bits.
  TORCH_ARG(bool, double_quantization) = true;
};

// Puts the weights of all pacer::modules::Linear that match in 4 bits, where they are, and returns the names
// of these layers. Do it before the optimizer and the Session are made. A layer that is in 4 bits already
// stays. Throws InvalidArgument, changing nothing, where a target matches no such layer, for weights that are
// not finite, not Float, BFloat16 or Half, that are tied to others, or merged.
std::vector<std::string> quantize(torch::nn::Module& model, const Nf4Options& options);

// All weights in 4 bits become parameters again, frozen and of the dtype that they had; returns the names of
// the layers. Their values stay those that 4 bits hold.
std::vector<std::string> dequantize(torch::nn::Module& model);

}  // namespace pacer::modules
