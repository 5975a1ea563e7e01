// Runs the cases. A build without CUDA has the same functions and no GPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "report.h"

namespace bench::kernels {

// Empty where GPU cases can run, else the reason why they cannot.
std::string obstacle_to_cuda();

// What a reader needs to judge the numbers: machine, versions, commit, date; and the same of the GPU.
std::vector<std::pair<std::string, std::string>> environment_facts();
std::vector<std::pair<std::string, std::string>> gpu_facts();

void run_on_cpu(const std::vector<Case>& cases, const Effort& effort, Report& report);
void run_on_cuda(const std::vector<Case>& cases, const Effort& effort, Report& report);

}  // namespace bench::kernels
