// The ways in which bytes go around ranks, as phases that follow each other: what goes over which link, and
// how many messages wait for each other. An alpha-beta model (Hockney 1994): a phase takes the bytes of its
// busiest link over the link's rate, and a latency for each message that waits for the one before.
#pragma once

#include <vector>

#include "cluster.h"

namespace scaling {

struct Phase {
  double inside = 0;                           // bytes that the busiest rank sends over links inside its node
  double host = 0;                             // bytes that the busiest node sends to others
  double sent = 0;                             // bytes that the busiest rank sends in all
  double steps_inside = 0, steps_between = 0;  // messages that wait for each other
};
using Exchange = std::vector<Phase>;

// Bytes of all phases together.
double sent_bytes(const Exchange& exchange);
double host_bytes(const Exchange& exchange);
// Without what it takes to start a collective. `ranks_per_core` ranks share a core where cores move the
// bytes.
double seconds_of(const Exchange& exchange, const Machine& machine, const Cluster& cluster,
                  double ranks_per_core = 1);
// One behind the other.
Exchange operator+(Exchange first, const Exchange& second);

// `bytes` is what each rank has before an all-reduce or a reduce-scatter, and after an all-gather. With one
// rank, all of them are empty.

// Each rank passes a W-th on, W - 1 times, around the ring of all ranks: a reduce-scatter or an all-gather.
// One rank of each node sends to another node.
Exchange ring_pass(double bytes, const Cluster& cluster);
// Two of these (Patarasuk and Yuan 2009).
Exchange ring_all_reduce(double bytes, const Cluster& cluster);
// Two binary trees of nodes, each for half of the bytes, and a chain inside nodes (Sanders, Speck and Traeff
// 2009; what NCCL calls a tree): up and down again.
Exchange tree_all_reduce(double bytes, const Cluster& cluster);
// A reduce-scatter inside nodes, an all-reduce of each part by a ring of nodes, and an all-gather inside
// nodes.
Exchange two_level_all_reduce(double bytes, const Cluster& cluster);
// The same inside nodes alone, by direct messages: an all-to-all and an all-gather.
Exchange node_all_reduce(double bytes, const Machine& machine, const Cluster& cluster);
// A W-th of `bytes` from each rank to each other one, the same or another.
Exchange direct(double bytes, const Cluster& cluster);
// As the machine's all_gather does it.
Exchange all_gather(double bytes, const Machine& machine, const Cluster& cluster);
// Signs of all elements, `bytes` together, to the servers of their chunks and back: from rank to rank.
Exchange sign_exchange(double bytes, const Machine& machine, const Cluster& cluster);
// From node to node: each rank carries a slice of every message, and the slices are put together in the node.
Exchange sign_exchange_by_nodes(double bytes, const Machine& machine, const Cluster& cluster);

}  // namespace scaling
