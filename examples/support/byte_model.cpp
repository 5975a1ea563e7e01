#include "support/byte_model.h"

#include <fstream>
#include <iterator>
#include <string>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

namespace examples {

torch::nn::Sequential make_byte_model() {
  constexpr int64_t kFeatures = 24, kHidden = 256, kBytes = 256;
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Embedding(kBytes, kFeatures), torch::nn::Flatten(),
                               torch::nn::Linear(kContext * kFeatures, kHidden), torch::nn::GELU(),
                               torch::nn::Linear(kHidden, kBytes));
}

torch::Tensor read_windows(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file) throw pacer::Error(std::string("cannot read ") + path);
  const auto bytes =
      torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kInt64);
  return bytes.unfold(0, kContext + 1, 1);
}

}  // namespace examples
