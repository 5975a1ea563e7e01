// What an average of weights costs beside the optimizer's step.
#pragma once

#include <c10/core/Device.h>

namespace bench::session {

void time_average(c10::Device device);

}  // namespace bench::session
