// What ranks run on and are joined by: one device a rank, links inside a node that each rank has to itself,
// and one link between a node and the others, which its ranks share. All links carry as much each way at the
// same time. Bytes, seconds, bytes per second.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace scaling {

struct Link {
  double rate;     // bytes per second each way
  double latency;  // seconds that a message takes beside its bytes
};

// One device, its kernels and the links inside its node.
struct Machine {
  std::string name;
  double copy;          // of a copy in memory, bytes read and written per second
  double update_share;  // of it that the optimizers' update kernels reach
  double sign_share;    // that the kernels reach which round to signs
  double torch_share;   // that LibTorch's fused AdamW reaches
  double cast_share;    // that LibTorch's copies between dtypes, and its sums, reach
  Link inside;
  double call;         // seconds to start a collective
  double socket_rate;  // bytes per second that a core takes through sockets and adds; 0: cores have no part
                       // in it
  bool nccl;  // all_gather is a ring and buckets grow with the model, as over NCCL; false: as over Gloo
};

// The machines that were measured: h200, h100, cpu. docs/scaling.md says where each number comes from.
const std::vector<Machine>& machines();
// Throws pacer::InvalidArgument with the nearest name.
const Machine& machine_named(const std::string& name);

// What Ethernet, IP and TCP leave of a link: 1448 of the 1514 bytes of a frame.
constexpr double kTcpShare = 1448.0 / 1514.0;

// A link of so many Gbit/s of which protocols leave `share`.
Link network_link(double gbit, double share, double latency_us);

struct Cluster {
  int64_t ranks = 1;
  int64_t ranks_per_node = 1;  // of a full node
  Link between{};              // of a node, shared by its ranks

  // Throws pacer::InvalidArgument unless the ranks fill one node in part, or whole nodes.
  void check() const;
  int64_t per_node() const;  // ranks of a node that are there
  int64_t nodes() const { return ranks / per_node(); }
};

}  // namespace scaling
