// What is measured: the step of an optimizer whose ranks exchange gradients or momentum, for a model of which
// there are only the shapes. Gradients lie there before the clock starts; there is no backward.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/communicator.h>

#include "collectives/clock.h"

namespace slow_network {

struct Model {
  std::string name;
  std::vector<std::vector<int64_t>> shapes;

  int64_t parameters() const;
};

// "gpt2": 124,439,808 parameters in 148 tensors; "small": 1.6 M, for a quick look. Throws
// pacer::InvalidArgument for other names.
Model model_named(const std::string& name);

// What stands in tables for an entry of --optimizers: "FusedAdamW fp32". Throws pacer::InvalidArgument for
// other names.
std::string title_of(const std::string& optimizer);

// What has left this host through its link (network device eth0) so far, TCP's own bytes included. Throws
// pacer::FileError where there is none.
int64_t bytes_over_link();

// Parameters and optimizer live as long as the returned functions. Has already taken the steps that come
// before those to measure. The same call on all ranks.
collectives::Way make_step(const std::string& optimizer, const Model& model,
                           const std::shared_ptr<pacer::Communicator>& world);

}  // namespace slow_network
