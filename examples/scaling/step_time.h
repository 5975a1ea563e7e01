// How long a training step takes on so many ranks with each way to exchange gradients: forward and backward,
// kernels by the bytes that they move, and what of the exchange does not hide behind backward. Every rank has
// its own batch, of one size whatever the number of ranks. Plain arithmetic; nothing is run.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "cluster.h"

namespace scaling {

// Of parameters and gradients; moments are fp32, bf16 parameters have 16-bit remainders.
enum class Dtype { fp32, bf16 };

enum class Rule { adamw, lamb, torch_adamw };  // the last is LibTorch's fused AdamW

enum class Scheme {
  ring,          // gradients in their dtype, by a ring of all ranks
  tree,          // by two trees of nodes
  two_level,     // by a ring inside nodes and one of nodes
  bf16,          // fp32 gradients sent as bf16, by ring or tree, whichever is faster
  onebit,        // signs from rank to rank
  onebit_nodes,  // signs from node to node, full precision inside
  zero2,         // Shards: parts of gradients and state (stages 1 and 2 send alike)
  zero3,         // Shards of blocks: parts of parameters, too
};

struct SchemeName {
  Scheme scheme;
  const char* name;
  const char* meaning;
};
constexpr size_t kSchemeCount = 8;
const std::array<SchemeName, kSchemeCount>& schemes();
const char* name_of(Scheme scheme);
// Throws pacer::InvalidArgument with the nearest name.
Scheme scheme_named(const std::string& name);

struct Workload {
  double parameters = 0;  // trained elements
  Dtype dtype = Dtype::fp32;
  Rule rule = Rule::adamw;
  double forward = 0, backward = 0;  // seconds; 0: an optimizer's step alone
  bool block_scales = true;          // a scale for each 2,048 signs
  double ranks_per_core = 1;         // that share a core, where cores do the work
};

// The elements of a known model (gpt2, gpt2-xl, bert-large) or the number itself, 7e9 for example. Throws
// pacer::InvalidArgument for another name and for a number out of range.
double parameters_of(const std::string& model);

// Seconds, and bytes of one step.
struct StepTime {
  double step = 0;      // all of it
  double exchange = 0;  // what the exchange takes where nothing hides it
  double kernels = 0;   // of the optimizer
  double sent = 0;      // bytes that a rank sends
  double host = 0;      // bytes that go from a node to others
};

// Nothing where the scheme makes no sense: bf16 on the wire for bf16 gradients, nodes where there is one only
// or each has a single rank, parts and signs of a single rank, signs of a rule that has none. 1-bit schemes:
// a compressed step, after the warm-up. Throws pacer::InvalidArgument for a cluster or numbers that cannot
// be.
std::optional<StepTime> step_time(const Workload& work, const Machine& machine, const Cluster& cluster,
                                  Scheme scheme);

// Whether the scheme begins with a warm-up in full precision.
bool has_warm_up(Scheme scheme);

// Which steps of a run with a 1-bit scheme do not travel as signs, and how they travel.
struct WarmUp {
  double share = 0.2;         // of the steps, before the freeze
  int64_t refresh_every = 0;  // steps; after the freeze, every so many-th refreshes the variance; 0: none
  bool is_bf16 = false;       // on the wire, else as ring or tree, whichever is faster

  double share_of_run() const {
    return share + (refresh_every > 0 ? (1 - share) / static_cast<double>(refresh_every) : 0);
  }
};

// The times of all schemes for one number of ranks. `run` is the mean step of a whole run.
struct Choice {
  std::optional<StepTime> time;
  double run = 0;
};
struct Row {
  Cluster cluster;
  std::array<Choice, kSchemeCount> choices;  // in the order of schemes()
  size_t best = 0;                           // the first whose `run` is within a tenth of the least
};
Row row_of(const Workload& work, const Machine& machine, const Cluster& cluster, const WarmUp& warm_up);

// Powers of two up to a full node, then doubled numbers of nodes, up to `most` ranks.
std::vector<int64_t> usual_ranks(int64_t ranks_per_node, int64_t most);

}  // namespace scaling
