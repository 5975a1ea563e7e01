// Memory that is saved by name, and loaded in place.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/named_tensors.h>

namespace pacer::detail {

// In the order in which a load looks at them.
using NamedViews = std::vector<std::pair<std::string, at::Tensor>>;

void save_views(const NamedViews& views, NamedTensors& state);

// What a refused load says around the name of a tensor, and after what it should be.
struct LoadRefusals {
  const char *before_missing, *after_missing, *after_misfit, *after_left_over;
};

// Copies every view from the state. Throws InvalidArgument where one is missing or of another dtype or shape,
// and where the state has more.
void load_views(const NamedViews& views, const NamedTensors& state, const LoadRefusals& refusals);

}  // namespace pacer::detail
