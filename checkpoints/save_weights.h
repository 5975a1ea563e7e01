// The weights of a model as one safetensors file, outside of a run: load_weights reads it back, and so does
// Python; weights in 4 bits are as transformers with bitsandbytes have them in "a checkpoint in 4 bits".
//
//   pacer::modules::quantize(*model, pacer::modules::Nf4Options().targets({"*_proj"}));
//   pacer::save_weights(*model, "llama-nf4/model.safetensors");
#pragma once

#include <string>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

// Writes all parameters and buffers in one safetensors file; of a pacer::modules::Linear in 4 bits
// LAYER.weight and what bitsandbytes keeps beside it. Adapters are not in it: save_adapter writes them. The
// file appears whole or not at all, in place of one that is there, and the disk has it when this returns;
// folders above it are made. On several ranks one of them calls it, and the model's parameters must all be
// there.
//
// InvalidArgument for a weight in 4 bits with an odd number of elements, which bitsandbytes does not read on
// every device, or that stands for one of 64 bits, and for dtypes that the format lacks; FileError where it
// cannot be written. The file is what it was then.
void save_weights(torch::nn::Module& model, const std::string& file);

}  // namespace pacer
