// Runs the GPU cases. A build without CUDA has the same functions and no GPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cases.h"
#include "report.h"

namespace bench {

// Empty where GPU cases can run, else the reason why they cannot.
std::string obstacle_to_cuda();

std::vector<std::pair<std::string, std::string>> gpu_facts();

void run_on_cuda(const std::vector<Case>& cases, const Arguments& arguments, Report& report);

}  // namespace bench
