// Weights in 4 bits in files, seen from a model: which of its layers they fit, and how they get there.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pacer/files/safetensors.h>
#include <pacer/modules/linear.h>
#include <pacer/optimizers/named_tensors.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace pacer::detail {

// What names and sizes tell before any values are read.
class QuantizedWeights {
 public:
  // `in_files`: all tensors of the files, without values. Layers in 4 bits as bitsandbytes writes them
  // (quant_state.h) are looked for; those of pacer's own checkpoints are tensors like any other, which a
  // model whose layers are in 4 bits has, too.
  QuantizedWeights(torch::nn::Module& model, const std::map<std::string, TensorView>& in_files);

  // Sentences about what cannot be loaded into this model.
  const std::vector<std::string>& misfits() const { return misfits_; }
  // Whether the name belongs to a weight in 4 bits of the files, or to one that is among the misfits.
  bool takes_from_file(const std::string& name) const { return file_names_.count(name) > 0; }
  // The same of the model's parameters and buffers.
  bool takes_from_model(const std::string& name) const { return model_names_.count(name) > 0; }
  // The names of the weights, "LAYER.weight", under all names that the layers have in the model.
  const std::set<std::string>& weights() const { return weights_; }
  // Where a part's values should go: beside the weight that they replace.
  at::Device place_of(const std::string& name) const;

  // Makes the weights of the values of all parts; calling put_in_force() then puts them in their layers.
  // Throws InvalidArgument or FileError that names the layer for what cannot be decoded.
  void build(const NamedTensors& values);
  void put_in_force();

 private:
  // A layer that has its weight from the files.
  struct Layer {
    modules::LinearImpl* layer;
    bool nested;
    modules::Nf4Weight weight;
  };
  void find_layers(torch::nn::Module& model, const std::map<std::string, TensorView>& in_files);
  void check_parts(const std::string& name, const modules::LinearImpl& layer,
                   const std::map<std::string, TensorView>& in_files);
  void find_other_storage(const std::map<std::string, TensorView>& in_files);
  void claim_model(modules::LinearImpl* layer);

  std::map<std::string, modules::LinearImpl*> linears_;  // of the model, by name
  std::map<std::string, Layer> layers_;
  std::map<std::string, at::Device> places_;  // of parts of `layers_`
  std::vector<std::string> misfits_;
  std::set<std::string> file_names_, model_names_, weights_;
};

}  // namespace pacer::detail
