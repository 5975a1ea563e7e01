// Runs the CPU cases.
#pragma once

#include <vector>

#include "arguments.h"
#include "cases.h"
#include "report.h"

namespace bench {

void run_on_cpu(const std::vector<Case>& cases, const Arguments& arguments, Report& report);

}  // namespace bench
