// A text as bytes, cut into sequences: what is trained on, and a held-out end.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>

namespace language_model {

class Text {
 public:
  // The file at `path`; empty: a header of LibTorch, which every build has. Throws pacer::Error where it cannot be read, and
  // pacer::InvalidArgument for a text that is too short for sequences of `length` bytes.
  Text(const std::string& path, int64_t length);

  // How many sequences there are to train on.
  size_t windows() const { return windows_; }
  // The sequences of these numbers and the bytes that follow each of theirs, Long [rows, length] both.
  std::pair<torch::Tensor, torch::Tensor> training(const std::vector<size_t>& numbers) const;
  // Sequences of the last tenth of the text, 64 at most.
  std::pair<torch::Tensor, torch::Tensor> held_out() const;

 private:
  std::pair<torch::Tensor, torch::Tensor> rows_at(const std::vector<int64_t>& begins) const;

  torch::Tensor bytes_;  // Long [bytes]
  int64_t length_;
  size_t windows_ = 0;
};

}  // namespace language_model
