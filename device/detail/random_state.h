// The state of LibTorch's default random generators: the CPU's and, for a model on a GPU, that device's.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

struct RandomState {
  at::Tensor cpu;   // uint8
  at::Tensor cuda;  // uint8 on the CPU; undefined for a model on the CPU
};

RandomState get_random_state(at::Device device);
// Throws InvalidArgument, changing nothing, where a state does not fit this generator. A state of the GPU's
// generator is passed over where the device is the CPU; where there is none, that generator keeps its own.
void set_random_state(at::Device device, const RandomState& state);

// What becomes of the GPU's generator where only one side has one, in a sentence; empty where both sides
// agree.
std::string note_on_random_state(bool run_has_gpu, bool saved_has_gpu);

}  // namespace pacer::detail
