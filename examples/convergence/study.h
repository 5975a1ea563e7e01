// The study: every arm, every seed, the files that are left behind and the table at the end.
#pragma once

#include "settings.h"

namespace convergence {

// Throws pacer::InvalidArgument for bad input, before any training; pacer::Error and c10::Error while
// running.
void run_study(const Settings& settings);

}  // namespace convergence
