// Models and files for tests of what is loaded into a model: small nets with layers that may be in 4 bits or
// have adapters, files put together from tensors, and everything that a failed load must leave as it was.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/checkpoints/detail/training_state.h>
#include <pacer/files/file_system.h>
#include <pacer/modules/linear.h>
#include <pacer/modules/lora.h>
#include <pacer/modules/nf4.h>

#include "support/optimizers/optimizers.h"
#include "support/temporary_folder.h"

namespace pacer::testing {

// The layers of the files in tests/data.
struct PeerNetImpl : torch::nn::Module {
  PeerNetImpl() {
    plain = register_module("plain", modules::Linear(64, 6));
    nested = register_module("nested", modules::Linear(torch::nn::LinearOptions(128, 132).bias(false)));
    small = register_module("small", modules::Linear(torch::nn::LinearOptions(64, 2).bias(false)));
  }
  modules::Linear plain = nullptr, nested = nullptr, small = nullptr;
};
TORCH_MODULE(PeerNet);

// x [N, 64] -> [N, 8]. "down" is a layer and also the last part of another's name.
struct FileNetImpl : torch::nn::Module {
  struct BlockImpl : torch::nn::Module {
    BlockImpl() {
      up = register_module("up", modules::Linear(64, 96));
      down = register_module("down", modules::Linear(torch::nn::LinearOptions(96, 64).bias(false)));
    }
    modules::Linear up = nullptr, down = nullptr;
  };
  TORCH_MODULE(Block);
  FileNetImpl() {
    block = register_module("block", Block());
    down = register_module("down", modules::Linear(64, 10));
    head = register_module("head", torch::nn::Linear(10, 8));
    steps = register_buffer("steps", torch::tensor(3));
  }
  Tensor forward(const Tensor& x) { return head(down(x + block->down(block->up(x).tanh()))); }
  Block block = nullptr;
  modules::Linear down = nullptr;
  torch::nn::Linear head = nullptr;
  Tensor steps;
};
TORCH_MODULE(FileNet);

inline void put_tensors_in(const std::string& path, const NamedTensors& tensors,
                           const std::map<std::string, std::string>& metadata = {}) {
  posix_file_system().remove_file(path);
  FileWriter out(posix_file_system(), path);
  detail::write_tensors(out, tensors, metadata);
  out.finish();
}

inline NamedTensors tensors_in(const std::string& path) {
  FileReader reader(posix_file_system(), path);
  NamedTensors tensors = detail::read_tensors(reader, path);
  reader.finish();
  return tensors;
}

// Every parameter and buffer by name, whether it requires a gradient, and where it lies.
struct ModelState {
  NamedTensors values;
  std::map<std::string, std::pair<const void*, bool>> facts;
};

inline ModelState state_of_model(const torch::nn::Module& model) {
  ModelState state;
  for (const auto& [name, tensor] : detail::model_tensors(model)) {
    state.values[name] = tensor.detach().clone();
    state.facts[name] = {tensor.const_data_ptr(), tensor.requires_grad()};
  }
  return state;
}

// The first name that differs, or "".
inline std::string changed_since(const torch::nn::Module& model, const ModelState& before) {
  const ModelState now = state_of_model(model);
  for (const auto& item : now.facts) {
    const auto was = before.facts.find(item.first);
    if (was == before.facts.end() || was->second != item.second) return item.first;
    if (!same_bits(now.values.at(item.first), before.values.at(item.first))) return item.first;
  }
  for (const auto& item : before.facts) {
    if (now.facts.count(item.first) == 0) return item.first;
  }
  return "";
}

inline Tensor text_tensor(const std::string& text) {
  const Tensor bytes = torch::empty({static_cast<int64_t>(text.size())}, torch::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

inline std::string text_of(const Tensor& bytes) {
  const Tensor dense = bytes.contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), static_cast<size_t>(dense.nbytes())};
}

using Names = std::vector<std::string>;

// Decodes a weight in 4 bits from its buffers, element by element in plain arithmetic.
inline Tensor decoded_by_hand(const modules::Nf4WeightImpl& weight) {
  static constexpr float kBook[] = {-1.0f,
                                    -0.6961928009986877f,
                                    -0.5250730514526367f,
                                    -0.39491748809814453f,
                                    -0.28444138169288635f,
                                    -0.18477343022823334f,
                                    -0.09105003625154495f,
                                    0.0f,
                                    0.07958029955625534f,
                                    0.16093020141124725f,
                                    0.24611230194568634f,
                                    0.33791524171829224f,
                                    0.44070982933044434f,
                                    0.5626170039176941f,
                                    0.7229568362236023f,
                                    1.0f};
  const int64_t count = weight.out_features * weight.in_features;
  Tensor values = torch::empty({count});
  for (int64_t i = 0; i < count; ++i) {
    const auto byte = weight.codes.const_data_ptr<uint8_t>()[i / 2];
    float scale = 0;
    if (weight.double_quantization) {
      volatile float product =
          weight.nested_quant_map.const_data_ptr<float>()[weight.absmax.const_data_ptr<uint8_t>()[i / 64]] *
          weight.nested_absmax.const_data_ptr<float>()[i / 64 / 256];
      scale = product + weight.nested_offset.item<float>();
    } else {
      scale = weight.absmax.const_data_ptr<float>()[i / 64];
    }
    values.mutable_data_ptr<float>()[i] = kBook[i % 2 == 0 ? byte >> 4 : byte & 15] * scale;
  }
  return values.view({weight.out_features, weight.in_features}).to(weight.dtype);
}

}  // namespace pacer::testing
