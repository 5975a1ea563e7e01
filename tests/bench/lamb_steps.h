// LAMB composed of LibTorch's operators, which has no LAMB of its own: the peers of FusedLamb.
#pragma once

#include "contenders.h"

namespace bench {

// One tensor after the other.
Contender make_lamb_loop(const ModelData& data);
// All tensors in each operator.
Contender make_lamb_foreach(const ModelData& data);

}  // namespace bench
