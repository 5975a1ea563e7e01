#include "exchange.h"

#include <algorithm>
#include <cmath>

namespace scaling {
namespace {

struct Numbers {
  explicit Numbers(const Cluster& cluster)
      : ranks(static_cast<double>(cluster.ranks)),
        per_node(static_cast<double>(cluster.per_node())),
        nodes(static_cast<double>(cluster.nodes())) {}
  double ranks, per_node, nodes;
};

Cluster one_node(const Cluster& cluster) { return {cluster.per_node(), cluster.per_node(), cluster.between}; }

// Those that have the same number in their nodes, one in each.
Cluster counterparts(const Cluster& cluster) { return {cluster.nodes(), 1, cluster.between}; }

// What each of a node's ranks does with its counterparts goes through the node's link together.
Exchange beside_node(Exchange exchange, double per_node) {
  for (Phase& phase : exchange) phase.host *= per_node;
  return exchange;
}

double sum(const Exchange& exchange, double Phase::*bytes) {
  double total = 0;
  for (const Phase& phase : exchange) total += phase.*bytes;
  return total;
}

}  // namespace

double sent_bytes(const Exchange& exchange) { return sum(exchange, &Phase::sent); }
double host_bytes(const Exchange& exchange) { return sum(exchange, &Phase::host); }

double seconds_of(const Exchange& exchange, const Machine& machine, const Cluster& cluster,
                  double ranks_per_core) {
  double seconds = 0;
  for (const Phase& phase : exchange) {
    const double inside = phase.inside / machine.inside.rate;
    const double between = phase.host > 0 ? phase.host / cluster.between.rate : 0;
    seconds += std::max(inside, between) + phase.steps_inside * machine.inside.latency +
               phase.steps_between * cluster.between.latency;
    if (machine.socket_rate > 0) seconds += ranks_per_core * phase.sent / machine.socket_rate;
  }
  return seconds;
}

Exchange operator+(Exchange first, const Exchange& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

Exchange ring_pass(double bytes, const Cluster& cluster) {
  const Numbers n(cluster);
  if (n.ranks == 1) return {};
  const double sent = (n.ranks - 1) / n.ranks * bytes;
  Phase phase;
  phase.sent = sent;
  phase.inside = n.per_node > 1 ? sent : 0;
  phase.host = n.nodes > 1 ? sent : 0;
  // All wait for the slowest of them.
  (n.nodes > 1 ? phase.steps_between : phase.steps_inside) = n.ranks - 1;
  return {phase};
}

Exchange ring_all_reduce(double bytes, const Cluster& cluster) {
  return ring_pass(bytes, cluster) + ring_pass(bytes, cluster);
}

Exchange tree_all_reduce(double bytes, const Cluster& cluster) {
  const Numbers n(cluster);
  if (n.ranks == 1) return {};
  // With two there is no rank that has two below it.
  const auto busiest = [bytes](double members) {
    return members == 1 ? 0 : members == 2 ? bytes : 2 * bytes;
  };
  Phase phase;
  phase.inside = busiest(n.per_node);
  phase.host = busiest(n.nodes);
  phase.sent = std::max(phase.inside, phase.host);
  phase.steps_inside = 2 * (n.per_node - 1);
  phase.steps_between = 2 * std::ceil(std::log2(n.nodes));
  return {phase};
}

Exchange two_level_all_reduce(double bytes, const Cluster& cluster) {
  const Numbers n(cluster);
  const Exchange inside = ring_pass(bytes, one_node(cluster));
  return inside + beside_node(ring_all_reduce(bytes / n.per_node, counterparts(cluster)), n.per_node) +
         inside;
}

Exchange node_all_reduce(double bytes, const Machine& machine, const Cluster& cluster) {
  return direct(bytes, one_node(cluster)) + all_gather(bytes, machine, one_node(cluster));
}

Exchange direct(double bytes, const Cluster& cluster) {
  const Numbers n(cluster);
  if (n.ranks == 1) return {};
  Phase phase;
  phase.sent = (n.ranks - 1) / n.ranks * bytes;
  phase.inside = (n.per_node - 1) / n.ranks * bytes;
  phase.host = n.per_node * (n.ranks - n.per_node) / n.ranks * bytes;
  phase.steps_inside = n.per_node - 1;
  phase.steps_between = n.ranks - n.per_node;
  return {phase};
}

Exchange all_gather(double bytes, const Machine& machine, const Cluster& cluster) {
  return machine.nccl ? ring_pass(bytes, cluster) : direct(bytes, cluster);
}

Exchange sign_exchange(double bytes, const Machine& machine, const Cluster& cluster) {
  return direct(bytes, cluster) + all_gather(bytes, machine, cluster);
}

Exchange sign_exchange_by_nodes(double bytes, const Machine& machine, const Cluster& cluster) {
  const Numbers n(cluster);
  const Exchange put_together = all_gather(bytes, machine, one_node(cluster));
  const double slice = bytes / n.per_node;
  return beside_node(direct(slice, counterparts(cluster)), n.per_node) + put_together +
         beside_node(all_gather(slice, machine, counterparts(cluster)), n.per_node) + put_together;
}

}  // namespace scaling
