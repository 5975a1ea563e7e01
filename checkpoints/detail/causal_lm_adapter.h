// Adapters of a CausalLm in PEFT's files, whose layers have the names of transformers' models: several of them are rows of
// one layer here, which has one adapter.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/adapter_folder.h>
#include <pacer/checkpoints/detail/adapter_modules.h>
#include <pacer/modules/lora_adapter.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// A layer of a file: the adapter of a layer of the model, of whose matrix B it has some rows.
struct LayerInFile {
  modules::LoraAdapter adapter;
  int64_t first, count;
};

// Layers as files have them, from the adapters of a model by the names of its layers: those of a CausalLm by transformers'
// names, those of other models as they are.
std::map<std::string, LayerInFile> layers_in_file(torch::nn::Module& model,
                                                  const std::map<std::string, modules::LoraAdapter>& layers);
// The same of what is saved beside an adapter. InvalidArgument for an embedding that is the head, too, which transformers
// would have twice.
void name_as_in_file(torch::nn::Module& model, AdapterModules& beside);

// Where the model is a CausalLm and the folder has layers by transformers' names: makes of both what they are here, and
// returns true. Adapters of one layer are joined: with one A where theirs are equal, else of the sum of their ranks.
// `values` are then those of the folder. InvalidArgument and FileError as load_adapter has them.
bool join_layers(torch::nn::Module& model, AdapterFolder& folder, NamedTensors& values);

}  // namespace pacer::detail
