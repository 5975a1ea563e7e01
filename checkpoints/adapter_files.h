// Low-rank adapters as PEFT keeps them, a folder with adapter_model.safetensors and adapter_config.json: what
// was trained here is used there, and the other way round (github.com/huggingface/peft).
//
//   pacer::save_adapter(*model, "run/adapter");
//   pacer::load_adapter(*model, "run/adapter");       // into a model that has it, or has none yet
//
//   model = peft.PeftModel.from_pretrained(base, "run/adapter")           # Python
//
// The layers of a CausalLm have transformers' names in the files: queries, keys and values, and both halves of SwiGLU,
// which are one layer with one adapter here, have the same matrix A there and rows of B. Read from there, adapters with
// matrices A of their own are joined to one whose r is the sum of theirs; it computes the same.
#pragma once

#include <string>
#include <vector>

#include <torch/arg.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer {

// Writes the model's adapter of that name: its matrices, whether or not it is active, its options and names
// of layers, and as PEFT's modules_to_save whole modules that training changes beside it: those with other
// parameters that require a gradient, and those with running statistics (batch norm). The folder is made
// where it is missing; each file appears whole or not at all, in place of one that is there, and the disk has
// both when this returns. A program that dies in between leaves no file of one adapter beside one of another.
// On several ranks one of them calls it. Running statistics of the model itself, or of a module with adapted
// layers, have no place in PEFT's files: they are left out, and a warning names them.
//
// InvalidArgument where the model has no adapter of that name, and for a trained parameter that PEFT's files
// have no place for (one of the model itself, or of a layer with an adapter, or an embedding that is the head,
// too); FileError where a file cannot be written.
void save_adapter(torch::nn::Module& model, const std::string& folder, const std::string& name = "default");

struct LoadAdapterOptions {
  // The name of the adapter in the model.
  TORCH_ARG(std::string, name) = "default";
  // False: nothing that is loaded requires a gradient. True: where the adapter is added its matrices do, and
  // the parameters of its modules_to_save but for those with running statistics; where it is there already,
  // all stay as they are.
  TORCH_ARG(bool, trainable) = true;
};

// Where the model has no adapter of that name: adds it to exactly the layers that the file has, as
// pacer::modules::add_lora_to does (everything else is frozen, the adapter becomes the active one); before
// the optimizer and the Session are made. Where it has one: writes the values into it, which must be of the
// same layers, r, scale and use of DoRA; then the optimizer stays valid, and which adapter is active stays as it is.
// modules_to_save are written to the model's own modules, of which it has one for all of its adapters. Values
// are converted to the model's dtype; a new adapter is fp32. Links to the two files are followed. Returns
// the names of the layers, sorted.
//
// InvalidArgument for a layer of the file that is none of the model's that take adapters (lora_layer.h), or of
// another kind or size, for parts of one layer of a CausalLm that are scaled differently or of which only some have
// DoRA, for what PEFT can do and pacer cannot (trained biases, ...; the message names it), for values that are not
// finite or beyond the dtype's largest, for modules_to_save other than the model's where it has another adapter,
// and for an adapter that is merged; FileError for files that are not there, damaged or do not belong together.
// Nothing was changed then.
std::vector<std::string> load_adapter(torch::nn::Module& model, const std::string& folder,
                                      const LoadAdapterOptions& options = {});

}  // namespace pacer
