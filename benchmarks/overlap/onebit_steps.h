// Steps of OneBitAdam after its freeze, beside DataParallel with FusedAdamW.
#pragma once

#include "training.h"

namespace bench::overlap {

// Prints rows: momentum in one buffer and in buckets, behind backward and not, and where a step's time goes.
void time_onebit(const Shape& shape, const World& world, int64_t rounds, int64_t steps);

}  // namespace bench::overlap
