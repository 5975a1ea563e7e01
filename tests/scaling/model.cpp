// The model of pacer-scaling: exchanges against closed forms, limits, and every step of the data file against
// what was measured.
#include <cmath>
#include <limits>

#include <pacer/core/error.h>

#include "scaling/exchange.h"
#include "scaling/kernels.h"
#include "scaling/measured.h"
#include "support/catch.h"

namespace scaling::testing {
namespace {

using Catch::Approx;
using Catch::Matchers::ContainsSubstring;

constexpr double kBytes = 840e6;

Cluster hosts(int64_t ranks, int64_t ranks_per_node, double gbit = 10) {
  return {ranks, ranks_per_node, network_link(gbit, 1, 25)};
}

const Machine& h200() { return machine_named("h200"); }

Workload bert() {
  Workload work;
  work.parameters = parameters_of("bert-large");
  return work;
}

double steps(const Exchange& exchange) {
  double all = 0;
  for (const Phase& phase : exchange) all += phase.steps_inside + phase.steps_between;
  return all;
}

TEST_CASE("a ring sends 2 (W-1)/W of the bytes in 2 (W-1) steps, and as much through each host's link") {
  CHECK(sent_bytes(ring_all_reduce(kBytes, hosts(2, 1))) == Approx(840e6));
  CHECK(sent_bytes(ring_all_reduce(kBytes, hosts(4, 1))) == Approx(1260e6));
  CHECK(sent_bytes(ring_all_reduce(kBytes, hosts(8, 8))) == Approx(1470e6));
  CHECK(host_bytes(ring_all_reduce(kBytes, hosts(8, 8))) == 0);
  CHECK(host_bytes(ring_all_reduce(kBytes, hosts(8, 4))) == Approx(1470e6));
  CHECK(steps(ring_all_reduce(kBytes, hosts(8, 4))) == 14);
  // 10 Gbit/s are 1.25 GB/s.
  CHECK(seconds_of(ring_all_reduce(kBytes, hosts(4, 1)), h200(), hosts(4, 1)) ==
        Approx(1260e6 / 1.25e9 + 6 * 25e-6));
}

TEST_CASE("a tree sends the bytes up and down, in twice the logarithm of its nodes") {
  CHECK(sent_bytes(tree_all_reduce(kBytes, hosts(2, 1))) == Approx(840e6));
  CHECK(sent_bytes(tree_all_reduce(kBytes, hosts(16, 1))) == Approx(1680e6));
  CHECK(steps(tree_all_reduce(kBytes, hosts(1024, 1))) == 20);
  CHECK(steps(tree_all_reduce(kBytes, hosts(32, 4))) == 2 * 3 + 2 * 3);
}

TEST_CASE("two levels send what a ring of nodes does through each link, in fewer steps") {
  const Exchange exchange = two_level_all_reduce(kBytes, hosts(32, 4));
  CHECK(host_bytes(exchange) == Approx(2 * 7.0 / 8 * 840e6));
  CHECK(sent_bytes(exchange) == Approx(2 * 3.0 / 4 * 840e6 + 2 * 7.0 / 8 * 210e6));
  CHECK(steps(exchange) == 2 * 3 + 2 * 7);
}

TEST_CASE("signs between two hosts of two ranks send the bytes that docs/measurements counts") {
  const double signs = parameters_of("bert-large") / 8;
  CHECK(host_bytes(sign_exchange(signs, h200(), hosts(4, 2))) * 1e-6 == Approx(73.5).epsilon(0.005));
  CHECK(host_bytes(sign_exchange_by_nodes(signs, h200(), hosts(4, 2))) * 1e-6 == Approx(42.0).epsilon(0.005));
  CHECK(sent_bytes(sign_exchange(signs, h200(), hosts(4, 1))) * 1e-6 == Approx(62.9).epsilon(0.005));
  CHECK(sent_bytes(sign_exchange(signs, h200(), hosts(2, 1))) * 1e-6 == Approx(41.9).epsilon(0.005));
}

TEST_CASE("one rank exchanges nothing, and what needs several is not there") {
  const Row row = row_of(bert(), h200(), hosts(1, 1), {0.2});
  for (size_t i = 0; i < kSchemeCount; ++i) {
    const auto& time = row.choices[i].time;
    REQUIRE(time.has_value() == (i < 2));
    if (!time) continue;
    CHECK(time->sent == 0);
    CHECK(time->exchange == 0);
    CHECK(time->step * 1e3 == Approx(28 * 335.174458e6 / (0.98 * 4280e9) * 1e3));
  }
}

TEST_CASE("links without limits leave compute and kernels") {
  Machine machine = h200();
  machine.inside = {std::numeric_limits<double>::infinity(), 0};
  machine.call = 0;
  Cluster cluster = hosts(64, 8);
  cluster.between = {std::numeric_limits<double>::infinity(), 0};
  Workload work = bert();
  work.forward = 0.02;
  work.backward = 0.04;
  CHECK(step_time(work, machine, cluster, Scheme::ring)->step ==
        Approx(0.06 + Kernels(work, machine).update()));
  CHECK(step_time(work, machine, cluster, Scheme::onebit)->step ==
        Approx(0.06 + Kernels(work, machine).compressed(64)));
  CHECK(step_time(work, machine, cluster, Scheme::zero3)->step ==
        Approx(0.06 + Kernels(work, machine).update() / 64));
}

TEST_CASE("backward hides an all-reduce but for its last bucket, and hides no signs") {
  Workload work = bert();
  work.backward = 10;  // seconds, longer than any exchange here
  const StepTime ring = *step_time(work, h200(), hosts(4, 1), Scheme::ring);
  const double exposed = ring.step - 10 - ring.kernels;
  CHECK(exposed == Approx(ring.exchange / 13));  // buckets of 100 MiB
  const StepTime signs = *step_time(work, h200(), hosts(4, 1), Scheme::onebit);
  CHECK(signs.step == Approx(10 + signs.exchange + signs.kernels));
}

TEST_CASE("more hosts never make an all-reduce shorter, nor do slower links") {
  for (const Scheme scheme : {Scheme::ring, Scheme::tree, Scheme::two_level, Scheme::bf16}) {
    double before = 0;
    for (int64_t ranks = 16; ranks <= 1024; ranks *= 2) {
      const double now = step_time(bert(), h200(), hosts(ranks, 8), scheme)->step;
      CHECK(now >= before);
      CHECK(step_time(bert(), h200(), hosts(ranks, 8, 1), scheme)->step > now);
      before = now;
    }
  }
}

TEST_CASE("a run counts the warm-up of signs as the faster of ring and tree") {
  const Row row = row_of(bert(), h200(), hosts(16, 8), {0.25});
  const auto at = [&](Scheme scheme) { return row.choices[static_cast<size_t>(scheme)]; };
  const double warm_up = std::min(at(Scheme::ring).time->step, at(Scheme::tree).time->step);
  CHECK(at(Scheme::onebit).run == Approx(0.25 * warm_up + 0.75 * at(Scheme::onebit).time->step));
  CHECK(at(Scheme::zero3).run == at(Scheme::zero3).time->step);
}

TEST_CASE("refreshes count as steps of the warm-up, and bf16 halves what both send") {
  const WarmUp few{0.06, 64, /*is_bf16=*/true};
  const Row row = row_of(bert(), h200(), hosts(16, 8), few);
  const auto at = [&](Scheme scheme) { return row.choices[static_cast<size_t>(scheme)]; };
  const double full = 0.06 + 0.94 / 64;
  CHECK(at(Scheme::onebit).run ==
        Approx(full * at(Scheme::bf16).time->step + (1 - full) * at(Scheme::onebit).time->step));
  // Gradients in bf16 have no shorter form on the wire.
  Workload halves = bert();
  halves.dtype = Dtype::bf16;
  CHECK(
      row_of(halves, h200(), hosts(16, 8), {0.2, 0, true}).choices[static_cast<size_t>(Scheme::onebit)].run ==
      row_of(halves, h200(), hosts(16, 8), {0.2}).choices[static_cast<size_t>(Scheme::onebit)].run);
}

TEST_CASE("the best scheme is the first that is no more than a tenth behind") {
  Workload work = bert();
  work.forward = 0.019;
  work.backward = 0.038;
  // NVLink hides the ring behind backward; signs and parts gain too little to count.
  CHECK(schemes()[row_of(work, h200(), hosts(4, 4), {0.2}).best].scheme == Scheme::ring);
  CHECK(schemes()[row_of(work, h200(), hosts(8, 1, 1), {0.2}).best].scheme == Scheme::onebit);
  CHECK(schemes()[row_of(work, h200(), hosts(8, 4), {0.2}).best].scheme == Scheme::onebit_nodes);
}

TEST_CASE("what cannot be is refused in a sentence") {
  CHECK_THROWS_WITH(step_time(bert(), h200(), hosts(12, 8), Scheme::ring),
                    ContainsSubstring("12 ranks do not fill nodes of 8"));
  CHECK_THROWS_WITH(machine_named("h20"), ContainsSubstring("did you mean 'h200'?"));
  CHECK_THROWS_WITH(scheme_named("1bit"), ContainsSubstring("did you mean '1-bit'?"));
  CHECK_THROWS_WITH(parameters_of("bert-lrge"), ContainsSubstring("did you mean 'bert-large'?"));
  CHECK_THROWS_AS(parameters_of("0"), pacer::InvalidArgument);
  CHECK_THROWS_AS(read_measured("/nowhere"), pacer::FileError);
}

TEST_CASE("the model is within a tenth of every step that it is validated with, and says where it is not") {
  int validated = 0;
  for (const Measured& measured : read_measured(PACER_SCALING_DATA)) {
    const double off = std::fabs(predicted(measured) / measured.milliseconds - 1);
    INFO(measured.machine << " " << measured.model << " " << measured.scheme << " " << measured.ranks
                          << " at " << measured.gbit << ": " << measured.milliseconds << ", by the model "
                          << predicted(measured));
    CHECK((off > 0.1) == (measured.use == "missed"));
    validated += measured.use == "validation" ? 1 : 0;
  }
  CHECK(validated >= 40);
}

}  // namespace
}  // namespace scaling::testing
