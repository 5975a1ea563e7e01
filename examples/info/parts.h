// The names of pacer's parts with a line each. tests/examples/info.py compares names and slots with what the
// public headers declare, so that a new part cannot be forgotten here.
#pragma once

#include <string>

namespace info {

// Optimizers, hooks with their slots and schedules, as a text.
std::string list_of_parts();

}  // namespace info
