#include "step_time.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include <pacer/core/error.h>

#include "exchange.h"
#include "kernels.h"
#include "support/nearest_name.h"

namespace scaling {
namespace {

constexpr double kMiB = 1024 * 1024;
constexpr double kNoBetter = 1.1;  // differences below a tenth are below what the model can tell

// The library's own sizes (DataParallelOptions::bucket_bytes).
double bucket_count(double gradient_bytes, bool nccl) {
  const double bytes = nccl ? std::clamp(gradient_bytes / 12, 25 * kMiB, 100 * kMiB) : 25 * kMiB;
  return std::max(1.0, std::ceil(gradient_bytes / bytes));
}

// One computation of a step and the exchange of what it makes, piece by piece.
struct Pipe {
  const Workload& work;
  const Machine& machine;
  const Cluster& cluster;
  double pieces;

  // Latencies count for each piece, the start of the first one alone shows.
  double seconds(const Exchange& exchange) const {
    if (exchange.empty()) return 0;
    double latencies = 0;
    for (const Phase& phase : exchange) {
      latencies +=
          phase.steps_inside * machine.inside.latency + phase.steps_between * cluster.between.latency;
    }
    return machine.call + seconds_of(exchange, machine, cluster, work.ranks_per_core) +
           (pieces - 1) * latencies;
  }
};

// When both have ended: the exchange begins when the first piece is made, and its last piece leaves when all
// is made.
double overlapped(double computing, double exchanging, double pieces) {
  return std::max(computing + exchanging / pieces, computing / pieces + exchanging);
}

struct Maker {
  const Workload& work;
  const Machine& machine;
  const Cluster& cluster;
  Kernels kernels;
  double gradient_bytes;
  Pipe pipe;

  Maker(const Workload& w, const Machine& m, const Cluster& c)
      : work(w),
        machine(m),
        cluster(c),
        kernels(w, m),
        gradient_bytes(w.parameters * (w.dtype == Dtype::fp32 ? 4 : 2)),
        pipe{w, m, c, bucket_count(gradient_bytes, m.nccl)} {}

  // Gradients that come together while backward runs, then `kernel_seconds`; `casts` go with the buckets.
  StepTime averaged(const Exchange& exchange, double kernel_seconds, double casts = 0) const {
    StepTime time;
    time.exchange = pipe.seconds(exchange) + casts;
    time.kernels = kernel_seconds;
    time.step = work.forward + overlapped(work.backward, time.exchange, pipe.pieces) + time.kernels;
    time.sent = sent_bytes(exchange);
    time.host = host_bytes(exchange);
    return time;
  }

  StepTime full_precision(const Exchange& exchange) const { return averaged(exchange, kernels.update()); }

  StepTime halved() const {
    const Exchange ring = ring_all_reduce(gradient_bytes / 2, cluster),
                   tree = tree_all_reduce(gradient_bytes / 2, cluster);
    return averaged(pipe.seconds(tree) < pipe.seconds(ring) ? tree : ring, kernels.update(),
                    cluster.ranks > 1 ? kernels.casts() : 0);
  }

  double sign_bytes() const {
    constexpr double kRow = 2048, kScaleBytes = 4;
    return work.parameters * (1.0 / 8 + (work.block_scales ? kScaleBytes / kRow : 0));
  }

  // Behind what has been averaged first: a number of each rank, then the signs. Without the gradients of
  // vectors, a thousandth of most models, which are one more small collective.
  StepTime with_signs(StepTime time, const Exchange& signs, double calls, double workers) const {
    const Exchange norms = all_gather(8.0 * static_cast<double>(cluster.ranks), machine, cluster);
    const double seconds =
        calls * machine.call + seconds_of(norms + signs, machine, cluster, work.ranks_per_core);
    const double kernel_seconds = kernels.compressed(workers);
    time.exchange += seconds;
    time.kernels += kernel_seconds;
    time.step += seconds + kernel_seconds;
    time.sent += sent_bytes(signs);
    time.host += host_bytes(signs);
    return time;
  }

  StepTime signs() const {
    constexpr double kCalls = 3;
    return with_signs(averaged({}, 0), sign_exchange(sign_bytes(), machine, cluster), kCalls,
                      static_cast<double>(cluster.ranks));
  }

  StepTime signs_by_nodes() const {
    constexpr double kCalls = 5;
    const Exchange inside = node_all_reduce(gradient_bytes, machine, cluster);
    return with_signs(averaged(inside, 0, kernels.node_sums(static_cast<double>(cluster.per_node()))),
                      sign_exchange_by_nodes(sign_bytes(), machine, cluster), kCalls,
                      static_cast<double>(cluster.nodes()));
  }

  StepTime parts_of_state() const {
    const double part = 1 / static_cast<double>(cluster.ranks);
    const Exchange gather = ring_pass(gradient_bytes, cluster);  // parameters, as large as gradients
    StepTime time = averaged(ring_pass(gradient_bytes, cluster), kernels.update() * part);
    const double seconds = pipe.seconds(gather);
    time.exchange += seconds;
    time.step += seconds;
    time.sent += sent_bytes(gather);
    time.host += host_bytes(gather);
    return time;
  }

  // A block's parameters are gathered before it runs, forward and backward, while the one before computes.
  StepTime parts_of_parameters() const {
    const double part = 1 / static_cast<double>(cluster.ranks);
    const Exchange pass = ring_pass(gradient_bytes, cluster);
    const double once = pipe.seconds(pass);
    StepTime time;
    time.exchange = 3 * once;
    time.kernels = kernels.update() * part;
    time.step = overlapped(work.forward, once, pipe.pieces) +
                overlapped(work.backward, 2 * once, pipe.pieces) + time.kernels;
    time.sent = 3 * sent_bytes(pass);
    time.host = 3 * host_bytes(pass);
    return time;
  }
};

void check(const Workload& work) {
  pacer::require(work.parameters >= 1, "a model has at least one parameter, not ", work.parameters);
  pacer::require(work.forward >= 0 && work.backward >= 0 && std::isfinite(work.forward + work.backward),
                 "forward and backward take no negative time");
}

}  // namespace

const std::array<SchemeName, kSchemeCount>& schemes() {
  static const std::array<SchemeName, kSchemeCount> all = {{
      {Scheme::ring, "ring", "all-reduce by a ring of all ranks"},
      {Scheme::tree, "tree", "all-reduce by two trees of nodes"},
      {Scheme::two_level, "two-level", "all-reduce inside nodes and between them"},
      {Scheme::bf16, "bf16", "ring or tree, gradients rounded to bf16"},
      {Scheme::onebit, "1-bit", "signs from rank to rank"},
      {Scheme::onebit_nodes, "1-bit-nodes", "signs from node to node"},
      {Scheme::zero2, "zero-2", "ZeRO 1 and 2: parts of state and gradients"},
      {Scheme::zero3, "zero-3", "ZeRO 3: parts of parameters, too"},
  }};
  return all;
}

const char* name_of(Scheme scheme) { return schemes()[static_cast<size_t>(scheme)].name; }

Scheme scheme_named(const std::string& name) {
  std::vector<std::string> known;
  for (const SchemeName& entry : schemes()) {
    if (entry.name == name) return entry.scheme;
    known.emplace_back(entry.name);
  }
  throw pacer::InvalidArgument("there is no scheme '" + name + "'; " + examples::suggestion(name, known));
}

double parameters_of(const std::string& model) {
  constexpr double kMost = 1e14;
  static const std::vector<std::pair<std::string, double>> known = {
      {"gpt2", 124'439'808}, {"gpt2-xl", 1'557'611'200}, {"bert-large", 335'174'458}};
  std::vector<std::string> names;
  for (const auto& [name, parameters] : known) {
    if (name == model) return parameters;
    names.push_back(name);
  }
  double number = 0;
  const auto parsed = std::from_chars(model.data(), model.data() + model.size(), number);
  const bool is_number = parsed.ec == std::errc() && parsed.ptr == model.data() + model.size();
  pacer::require(is_number, "there is no model '", model, "'; ", examples::suggestion(model, names),
                 " Or give its number of parameters, 7e9 for example");
  pacer::require(number >= 1 && number <= kMost, "a model has from 1 to ", kMost, " parameters, not ", model);
  return number;
}

bool has_warm_up(Scheme scheme) { return scheme == Scheme::onebit || scheme == Scheme::onebit_nodes; }

std::optional<StepTime> step_time(const Workload& work, const Machine& machine, const Cluster& cluster,
                                  Scheme scheme) {
  cluster.check();
  check(work);
  const Maker make(work, machine, cluster);
  const bool several = cluster.ranks > 1, has_signs = several && work.rule != Rule::torch_adamw;
  switch (scheme) {
    case Scheme::ring:
      return make.full_precision(ring_all_reduce(make.gradient_bytes, cluster));
    case Scheme::tree:
      return make.full_precision(tree_all_reduce(make.gradient_bytes, cluster));
    case Scheme::two_level:
      if (cluster.nodes() == 1 || cluster.per_node() == 1) return std::nullopt;
      return make.full_precision(two_level_all_reduce(make.gradient_bytes, cluster));
    case Scheme::bf16:
      if (!several || work.dtype == Dtype::bf16) return std::nullopt;
      return make.halved();
    case Scheme::onebit:
      if (!has_signs) return std::nullopt;
      return make.signs();
    case Scheme::onebit_nodes:
      if (!has_signs || cluster.nodes() == 1 || cluster.per_node() == 1) return std::nullopt;
      return make.signs_by_nodes();
    case Scheme::zero2:
      if (!several || work.rule == Rule::torch_adamw) return std::nullopt;
      return make.parts_of_state();
    case Scheme::zero3:
      if (!several || work.rule == Rule::torch_adamw) return std::nullopt;
      return make.parts_of_parameters();
  }
  return std::nullopt;
}

Row row_of(const Workload& work, const Machine& machine, const Cluster& cluster, const WarmUp& warm_up) {
  pacer::require(warm_up.share >= 0 && warm_up.share <= 1,
                 "the share of the warm-up must be from 0 to 1, not ", warm_up.share);
  Row row{cluster, {}, 0};
  for (size_t i = 0; i < kSchemeCount; ++i)
    row.choices[i].time = step_time(work, machine, cluster, schemes()[i].scheme);
  const auto time_of = [&](Scheme scheme) { return row.choices[static_cast<size_t>(scheme)].time; };
  const bool halves = warm_up.is_bf16 && time_of(Scheme::bf16);
  const double in_full = halves ? time_of(Scheme::bf16)->step
                                : std::min(time_of(Scheme::ring)->step, time_of(Scheme::tree)->step);
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < kSchemeCount; ++i) {
    Choice& choice = row.choices[i];
    if (!choice.time) continue;
    const double share = has_warm_up(schemes()[i].scheme) ? warm_up.share_of_run() : 0;
    choice.run = share * in_full + (1 - share) * choice.time->step;
    least = std::min(least, choice.run);
  }
  while (!row.choices[row.best].time || row.choices[row.best].run > kNoBetter * least) ++row.best;
  return row;
}

std::vector<int64_t> usual_ranks(int64_t ranks_per_node, int64_t most) {
  std::vector<int64_t> ranks;
  for (int64_t per_node = 1; per_node < ranks_per_node && per_node <= most; per_node *= 2)
    ranks.push_back(per_node);
  for (int64_t several = ranks_per_node; several <= most; several *= 2) ranks.push_back(several);
  return ranks;
}

}  // namespace scaling
