#include "cluster.h"

#include <algorithm>

#include <pacer/core/error.h>

#include "support/nearest_name.h"

namespace scaling {

const std::vector<Machine>& machines() {
  constexpr double kGiga = 1e9, kMicro = 1e-6;
  static const std::vector<Machine> all = {
      {"h200", 4280 * kGiga, 0.98, 0.95, 0.83, 0.60, {305 * kGiga, 2 * kMicro}, 80 * kMicro, 0, true},
      {"h100", 3030 * kGiga, 0.98, 0.95, 0.83, 0.60, {305 * kGiga, 2 * kMicro}, 80 * kMicro, 0, true},
      {"cpu",
       48.5 * kGiga,
       1.00,
       0.0853,
       1.00,
       0.50,
       {4 * kGiga, 20 * kMicro},
       100 * kMicro,
       2.1 * kGiga,
       false},
  };
  return all;
}

const Machine& machine_named(const std::string& name) {
  std::vector<std::string> known;
  for (const Machine& machine : machines()) {
    if (machine.name == name) return machine;
    known.push_back(machine.name);
  }
  throw pacer::InvalidArgument("there is no machine '" + name + "'; " + examples::suggestion(name, known));
}

Link network_link(double gbit, double share, double latency_us) {
  return {gbit * 1e9 / 8 * share, latency_us * 1e-6};
}

void Cluster::check() const {
  pacer::require(ranks >= 1 && ranks_per_node >= 1, "ranks and ranks of a node must be at least 1, not ",
                 ranks, " and ", ranks_per_node);
  pacer::require(ranks <= ranks_per_node || ranks % ranks_per_node == 0, ranks,
                 " ranks do not fill nodes of ", ranks_per_node, "; choose a multiple of ", ranks_per_node);
}

int64_t Cluster::per_node() const { return std::min(ranks, ranks_per_node); }

}  // namespace scaling
