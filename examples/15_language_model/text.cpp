#include "text.h"

#include <algorithm>
#include <fstream>
#include <iterator>

#include <ATen/ops/stack.h>
#include <torch/utils.h>

#include <pacer/core/error.h>

namespace language_model {

Text::Text(const std::string& path, int64_t length) : length_(length) {
  const std::string file = path.empty() ? PACER_TORCH_INCLUDE_DIR "/ATen/core/TensorBody.h" : path;
  std::ifstream in(file, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(in), {});
  pacer::require<pacer::Error>(!in.bad() && !text.empty(), "cannot read a text from ", file);
  bytes_ = torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kLong);
  const int64_t trained = bytes_.size(0) - bytes_.size(0) / 10;
  pacer::require(bytes_.size(0) / 10 > length, file, " has ", bytes_.size(0),
                 " bytes; a tenth of it must be longer than a sequence of --length ", length);
  windows_ = static_cast<size_t>((trained - 1) / length);
}

std::pair<torch::Tensor, torch::Tensor> Text::rows_at(const std::vector<int64_t>& begins) const {
  std::vector<torch::Tensor> ids, targets;
  for (const int64_t begin : begins) {
    ids.push_back(bytes_.narrow(0, begin, length_));
    targets.push_back(bytes_.narrow(0, begin + 1, length_));
  }
  return {torch::stack(ids), torch::stack(targets)};
}

std::pair<torch::Tensor, torch::Tensor> Text::training(const std::vector<size_t>& numbers) const {
  std::vector<int64_t> begins;
  for (const size_t number : numbers) begins.push_back(static_cast<int64_t>(number) * length_);
  return rows_at(begins);
}

std::pair<torch::Tensor, torch::Tensor> Text::held_out() const {
  constexpr int64_t kMost = 64;
  const int64_t first = bytes_.size(0) - bytes_.size(0) / 10;
  const int64_t count = std::min(kMost, (bytes_.size(0) - first - 1) / length_);
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < count; ++i) begins.push_back(first + i * length_);
  return rows_at(begins);
}

}  // namespace language_model
