// An adapter's folder: what its two files say, checked as far as that goes without a model, and with one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/ScalarType.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/adapter_config.h>
#include <pacer/modules/lora_adapter.h>
#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

constexpr const char* kAdapterModel = "adapter_model.safetensors";
constexpr const char* kAdapterConfig = "adapter_config.json";
constexpr std::string_view kAdapterPrefix = "base_model.model.";
// How the names of the two matrices of a layer end, and those of an embedding.
constexpr std::string_view kAdapterA = ".lora_A.weight", kAdapterB = ".lora_B.weight";
constexpr std::string_view kEmbeddingA = ".lora_embedding_A", kEmbeddingB = ".lora_embedding_B";
// How the name of what LoraOptions::dora trains ends.
constexpr std::string_view kMagnitude = ".lora_magnitude_vector";

// The name of the tensor of a layer that ends in one of these.
std::string name_in_file(const std::string& layer, std::string_view suffix);

struct AdapterFolder {
  struct Tensor {
    at::ScalarType dtype;
    std::vector<int64_t> shape;
  };
  struct Matrices {
    std::optional<std::vector<int64_t>> a, b;  // their shapes
    std::optional<std::vector<int64_t>> magnitude;
    bool is_embedding = false;
  };
  std::string path;  // of the file of tensors
  AdapterConfig config;
  std::map<std::string, Matrices> layers;
  std::map<std::string, Tensor> beside;  // of modules_to_save, by their names in the model
};

// InvalidArgument and FileError as load_adapter has them.
AdapterFolder read_adapter_folder(const std::string& folder);

// FileError where the folder has only one of the two matrices of the layer, or lacks the magnitudes of DoRA.
void require_both(const AdapterFolder& folder, const std::string& layer,
                  const AdapterFolder::Matrices& matrices);

// InvalidArgument where a layer of the folder is not one of the model's, of its size and under one name, and
// where modules_to_save are not modules of the model with exactly the tensors that they have there.
void check_layers(torch::nn::Module& model, const AdapterFolder& folder);

// All tensors by their names in the file: matrices in fp32, others as they are. InvalidArgument for values
// that are not finite, FileError where the file is no longer what it was.
NamedTensors read_adapter_tensors(const AdapterFolder& folder);

// Returns the layer's matrix A or B.
const at::Tensor& matrix_of(const NamedTensors& values, const std::string& layer, bool is_a);
// Returns the layer's magnitudes, which LoraOptions::dora trains.
const at::Tensor& magnitude_of(const NamedTensors& values, const std::string& layer);
// Returns the tensor of that name in modules_to_save.
const at::Tensor& beside_of(const NamedTensors& values, const std::string& name);

}  // namespace pacer::detail
