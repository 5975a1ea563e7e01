// What is known of GPUs. A build without CUDA says why it has none.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace info {

// Whether training can use a GPU here; else what is missing and how to get it, in one sentence.
std::string obstacle_to_gpu();

// Versions of toolkit, driver and NCCL, and a fact for each device.
std::vector<std::pair<std::string, std::string>> gpu_facts();

}  // namespace info
