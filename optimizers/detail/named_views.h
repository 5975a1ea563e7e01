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
  const char *before_missing, *after_missing, *after_misfit;
};

// Copies every view from the state and takes it out there. Throws InvalidArgument, changing nothing, where one
// is missing or of another dtype or shape.
void load_views(const NamedViews& views, NamedTensors& state, const LoadRefusals& refusals);
// Throws InvalidArgument where anything is left in the state, with these words behind its name.
void require_all_loaded(const NamedTensors& state, const char* refusal);

}  // namespace pacer::detail
