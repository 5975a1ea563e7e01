// The study: every arm, every seed, the files that are left behind and the table at the end.
#pragma once

#include "settings.h"

namespace convergence {

// Throws pacer::InvalidArgument for bad input that shows without training and without other ranks: texts that
// are missing, stored runs of other settings.
void check_study(const Settings& settings);

// On every rank alike; rank 0 writes and prints. Throws as check_study, before any training; pacer::Error and
// c10::Error while running.
void run_study(const Settings& settings);

}  // namespace convergence
