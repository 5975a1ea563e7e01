// What the machine calls its processor and its GPU, for the report.
#pragma once

#include <string>

namespace convergence {

std::string processor_name();  // "CPU" where the system does not say
std::string graphics_name();   // "CUDA device" where the system does not say

}  // namespace convergence
