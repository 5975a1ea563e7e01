#include "kernels.h"

namespace scaling {

Kernels::Kernels(const Workload& work, const Machine& machine) : work_(work), machine_(machine) {}

double Kernels::seconds(double bytes_per_parameter, double share) const {
  const double cores = machine_.nccl ? 1 : work_.ranks_per_core;
  return cores * work_.parameters * bytes_per_parameter / (share * machine_.copy);
}

double Kernels::update() const {
  const double saved =
      work_.dtype == Dtype::bf16 ? 2 : 0;  // bf16 gradients; the remainder makes up for the rest
  switch (work_.rule) {
    case Rule::adamw:
      return seconds(28 - saved, machine_.update_share);
    case Rule::lamb:
      return seconds(40 - saved, machine_.update_share);
    case Rule::torch_adamw:
      return seconds(28 - saved, machine_.torch_share);
  }
  return 0;
}

double Kernels::casts() const { return seconds(12, machine_.cast_share); }

double Kernels::node_sums(double per_node) const {
  // Into flat memory and back, 8 each; in between the first part of a chunk is copied, the others are added.
  return seconds(16 + (8 + 12 * (per_node - 1)) / per_node, machine_.cast_share);
}

double Kernels::compressed(double workers) const {
  const double gradient = work_.dtype == Dtype::bf16 ? 2 : 4;
  const double signs = (gradient + 8.25) + (workers / 8 + 8.125) / workers;  // worker, server
  double plain = gradient + 12.125;                                          // norm, update
  if (work_.rule == Rule::lamb) plain += 16.25;                              // moments
  return seconds(signs, machine_.sign_share) + seconds(plain, machine_.update_share);
}

}  // namespace scaling
