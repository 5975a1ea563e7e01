// What the examples with several optimizers train: a byte model that fits on a screen, and a text that every
// build has, LibTorch's own headers.
#pragma once

#include <cstdint>

#include <torch/nn/modules/container/sequential.h>

namespace examples {

constexpr int64_t kContext = 16;  // bytes that the model sees

// Predicts a byte from the kContext bytes before it: int64 [batch, kContext] to logits [batch, 256]. The same
// weights at every call.
torch::nn::Sequential make_byte_model();

// int64 [windows, kContext + 1]: every run of so many bytes in the file at `path`. Throws pacer::Error where
// it cannot be read.
torch::Tensor read_windows(const char* path);

}  // namespace examples
