// Fine-tuning by low-rank adapters (LoRA, arXiv:2106.09685; over weights in 4 bits QLoRA, arXiv:2305.14314):
// layers of pacer::modules, Linear, Conv1d, Conv2d, Conv3d and Embedding, get two small matrices each, everything
// else is frozen.
//
//   pacer::modules::quantize(*model, pacer::modules::Nf4Options().targets({"*_proj"}));  // or in 16 bits
//   pacer::modules::add_lora(*model, pacer::modules::LoraOptions(16).alpha(32).targets({"*_proj"}));
//   pacer::FusedAdamW optimizer(pacer::modules::trainable(*model), pacer::FusedAdamWOptions(2e-4));
//
// What trains is what requires a gradient: buckets, shards, norms and optimizers see adapters only. All
// functions check first; one that throws InvalidArgument has changed nothing.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>  // ordered_dict.h needs it and does not say so
#include <torch/csrc/api/include/torch/ordered_dict.h>
#include <torch/nn/module.h>

#include <pacer/modules/lora_adapter.h>

namespace pacer::modules {

// Whether a target names the layer: by its whole name, or by the last parts of it ("q_proj",
// "self_attn.q_proj"). "*" stands for any text without a dot, "**" for any text, "?" for one character.
bool matches_target(const std::string& name, const std::string& target);

// Adds an adapter to all layers that match and take one (lora_layer.h) and freezes all other parameters of the
// model; returns the names of the layers. The adapter becomes the active one. Do it before the optimizer and
// the Session are made, wherever the model is. Refused: targets that match no such layer, a layer that is
// merged, tied weights, a name that is taken, a rank that is no multiple of a convolution's groups, and an
// embedding with max_norm or sparse gradients.
std::vector<std::string> add_lora(torch::nn::Module& model, const LoraOptions& options);
// The same for exactly the layers of these names, whatever the targets of the options.
std::vector<std::string> add_lora_to(torch::nn::Module& model, const LoraOptions& options,
                                     const std::vector<std::string>& layers);
// The same with options of its own for each layer, which have one LoraOptions::name.
std::vector<std::string> add_lora_to(torch::nn::Module& model,
                                     const std::vector<std::pair<std::string, LoraOptions>>& layers);

// The names of the model's adapters, in the order in which they were added.
std::vector<std::string> adapters(const torch::nn::Module& model);
// This one takes part and is trained; all others neither. An empty name: none does.
void set_adapter(torch::nn::Module& model, const std::string& name);
// These take part, a layer adding up those of them that it has, and all of them are trained; all others
// neither. To train some of them only, call requires_grad_(false) on the parameters of the others afterwards.
void set_adapters(torch::nn::Module& model, const std::vector<std::string>& names);
// The others stay active. One that is merged alone stays in the weights; one that is merged together with others
// is refused.
void remove_adapter(torch::nn::Module& model, const std::string& name);

// Adds the product of the active adapters to the weights, in fp32 and rounded once, so that forward costs
// nothing more; unmerge() puts back the bytes that were there. Refused where a weight is in 4 bits, because
// rounding it to 4 bits once more would ruin it (dequantize() first), for a convolution with groups, whose
// adapter is no sum with its weight, and where a sum is not finite, or beyond the largest number of the
// weight's dtype. Where it throws, no layer is merged that was not before. A
// merged adapter is not trained.
void merge(torch::nn::Module& model);
void unmerge(torch::nn::Module& model);

// The parameters that require a gradient, by name.
torch::OrderedDict<std::string, at::Tensor> trainable(const torch::nn::Module& model);

}  // namespace pacer::modules
