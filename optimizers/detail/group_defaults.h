// What a parameter group that comes with options of its own takes from the optimizer's defaults.
#pragma once

#include <torch/version.h>

namespace pacer::detail {

// True from LibTorch 2.12 on, as in torch's Adam and AdamW: what the group's options leave as their
// constructor made it is taken from the defaults. Before, and in optimizers that torch does not have, a
// group's options stand as they are: a value that is meant cannot be told from one that was never set.
//
// torch::optim::Optimizer does so for its own six types of options. Of any other type it drops a group's
// options without a word, and the group gets a copy of the defaults. So groups with options never pass
// through it here.
constexpr bool kGroupsInheritDefaults = TORCH_VERSION_MAJOR > 2 ||
                                        (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 12);

}  // namespace pacer::detail
