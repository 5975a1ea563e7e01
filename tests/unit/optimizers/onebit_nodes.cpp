// The 1-bit optimizers with nodes as workers: the bits of the flat algorithm between as many ranks that bring
// their node's gradients; state and what is refused.
#include <pacer/collectives/detail/in_process_transport.h>
#include <pacer/hooks/gradient_accumulation.h>
#include <pacer/hooks/gradient_clipping.h>
#include <pacer/session/session.h>

#include "support/catch.h"

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"
#include "support/optimizers/onebit_sessions.h"

namespace pacer::testing::onebit_nodes {
namespace {

constexpr int64_t kFreeze = 4;

template <class O>
OptionsOf<O> options_of() {
  return OptionsOf<O>(0.01).freeze_step(kFreeze).compress_alone(true).weight_decay(0.1);
}
template <class O>
GroupsOf<O> groups_of(const OptionsOf<O>& options) {
  return {{{{40, 50}, {1}, {3000}}, options}, {{{64}}, OptionsOf<O>(options).compress(false)}};
}
template <class O>
OptionsOf<O> by_nodes(const OptionsOf<O>& options) {
  return OptionsOf<O>(options).hierarchical(true);
}

// Rounded so that sums over ranks are exact, in whatever order: where all ranks' gradients are added. In 16
// bits always, as the order in which averages are rounded and added differs.
Tensor coarse(const Tensor& gradient) {
  const double units = gradient.scalar_type() == at::kFloat ? 256 : 16;
  return at::round(gradient * units) / units;
}

// What ranks of nodes bring, and the mean of each node for ranks that are nodes.
template <class O>
std::pair<std::vector<std::vector<Tensor>>, std::vector<std::vector<Tensor>>> gradients_of(
    const OneBitRanks<O>& ranks, int64_t attempt, size_t per_node, bool all_are_added) {
  auto own = ranks.gradients(attempt);
  std::vector<std::vector<Tensor>> of_nodes(own.size() / per_node);
  for (size_t i = 0; i < own[0].size(); ++i) {
    const bool is_full = i + 1 == own[0].size();  // the group that is not compressed
    for (auto& of_rank : own) {
      const bool is_wide = of_rank[i].scalar_type() == at::kFloat;
      if (all_are_added || is_full || !is_wide) of_rank[i] = coarse(of_rank[i]);
      if (attempt % 11 == 9) of_rank[i] = at::full_like(of_rank[i], std::nan(""));
    }
    for (size_t rank = 0; rank < own.size(); ++rank) {
      const Tensor share = own[rank][i] * (1.0 / static_cast<double>(per_node));
      auto& node = of_nodes[rank / per_node];
      if (rank % per_node == 0) node.push_back(share.clone());
      if (rank % per_node != 0) node[i] = node[i] + share;
    }
  }
  return {own, of_nodes};
}

// "" or the first thing in which a run by nodes and a flat run of their workers differ.
template <class O>
std::string difference(const OneBitRanks<O>& ranks, const OneBitRanks<O>& workers, size_t per_node) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const size_t worker = rank / per_node;
    const std::string at = " of rank " + std::to_string(rank);
    if (!same_bits(ranks.parameters[rank], workers.parameters[worker])) return "a parameter" + at;
    NamedTensors own = cloned_state(ranks.optimizers[rank]->export_state());
    NamedTensors flat = cloned_state(workers.optimizers[worker]->export_state());
    for (auto& [name, tensor] : ranks.optimizers[rank]->export_rank_state()) own["rank's " + name] = tensor;
    for (auto& [name, tensor] : workers.optimizers[worker]->export_rank_state()) {
      flat["rank's " + name] = tensor;
    }
    for (NamedTensors* state : {&own, &flat}) {  // which say how many ranks there are
      for (auto it = state->begin(); it != state->end();) {
        const bool of_ranks = contains(it->first, "onebit/rank") || contains(it->first, "world_size") ||
                              contains(it->first, "hierarchical");
        it = of_ranks ? state->erase(it) : std::next(it);
      }
    }
    const std::string name = differing_name(own, flat);
    if (!name.empty()) return name + at;
  }
  return "";
}

// Steps [first, end) of both.
template <class O>
std::string run_beside(OneBitRanks<O>& ranks, OneBitRanks<O>& workers, size_t per_node, int64_t refresh_every,
                       int64_t first, int64_t end) {
  for (int64_t t = first; t < end; ++t) {
    const bool refresh = refresh_every > 0 && t >= kFreeze && (t + 1 - kFreeze) % refresh_every == 0;
    const auto [own, joined] = gradients_of<O>(ranks, t, per_node, t < kFreeze || refresh);
    for (const std::string& message : {ranks.step(own), workers.step(joined)}) {
      if (!message.empty()) return message;
    }
    const std::string what = difference<O>(ranks, workers, per_node);
    if (!what.empty()) return what + " after attempt " + std::to_string(t);
  }
  return "";
}

}  // namespace

TEMPLATE_TEST_CASE("with nodes as workers every step has the bits of the flat algorithm between them",
                   "[onebit_adam][onebit_lamb][nodes]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  // Numbers of ranks take turns with one scale and with scales of blocks, of the other optimizer the other way round.
  bool turn = std::is_same_v<O, OneBitAdam>;
  for (const auto& [nodes, per_node] : {std::pair{2, 2}, {3, 2}, {2, 4}, {1, 2}, {3, 1}}) {
    turn = !turn;
    for (const bool block_scales : {false, true}) {
      if (block_scales != turn && !wants_long_tests()) continue;
      CAPTURE(nodes, per_node, block_scales);
      auto options = options_of<O>();
      options.block_scales(block_scales);
      int64_t refresh_every = 0;
      if constexpr (std::is_same_v<O, OneBitAdam>) options.refresh_variance_every(refresh_every = 5);
      OneBitRanks<O> ranks(nodes * per_node, groups_of<O>(by_nodes<O>(options)), at::kFloat, per_node);
      OneBitRanks<O> workers(nodes, groups_of<O>(options));
      const auto m = static_cast<size_t>(per_node);
      REQUIRE(run_beside<O>(ranks, workers, m, refresh_every, 0, 20) == "");
      REQUIRE(ranks.optimizers[0]->skipped_steps() == 1);
      ranks.resume();
      REQUIRE(run_beside<O>(ranks, workers, m, refresh_every, 20, 30) == "");
    }
  }
}

TEMPLATE_TEST_CASE("so it has with gradients of 16 bits, which are divided before they are added, or not",
                   "[onebit_adam][onebit_lamb][nodes]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    CAPTURE(dtype);
    OneBitRanks<O> ranks(4, groups_of<O>(by_nodes<O>(options_of<O>())), dtype, 2);
    OneBitRanks<O> workers(2, groups_of<O>(options_of<O>()), dtype);
    REQUIRE(run_beside<O>(ranks, workers, 2, 0, 0, 20) == "");
  }
}

TEMPLATE_TEST_CASE("in Sessions, nodes accumulate over ranks what one rank would over micro-steps",
                   "[onebit_adam][onebit_lamb][nodes]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  for (const int per_node : {2, 3}) {
    for (const double max_norm : {0.5, 1e6}) {
      CAPTURE(per_node, max_norm);
      const auto options = options_of<O>();
      OneBitRanks<O> ranks(2 * per_node, groups_of<O>(by_nodes<O>(options)), at::kFloat, per_node);
      OneBitRanks<O> workers(2, groups_of<O>(options));
      Sessions sessions(ranks, [&](Session& session) { session.use(GradientClipping(max_norm)); });
      Sessions flat(workers, [&](Session& session) {
        session.use(GradientClipping(max_norm)).use(GradientAccumulation(per_node));
      });
      const auto m = static_cast<size_t>(per_node);
      for (int64_t t = 0; t < 14; ++t) {
        if (t == 9) continue;  // which would be skipped
        const auto own = gradients_of<O>(ranks, t, m, t < kFreeze).first;
        std::vector<std::vector<std::vector<Tensor>>> micro_steps(m);
        for (size_t i = 0; i < m; ++i) micro_steps[i] = {own[i], own[m + i]};
        REQUIRE(sessions.step(ranks, {own}) == "");
        REQUIRE(flat.step(workers, micro_steps) == "");
        CAPTURE(t);
        REQUIRE(difference<O>(ranks, workers, m) == "");
      }
      REQUIRE(ranks.optimizers[0]->phase() == OneBitPhase::compressed);
      CHECK(sessions.finish(ranks) == "");
      CHECK(flat.finish(workers) == "");
    }
  }
}

TEMPLATE_TEST_CASE("errors of nodes are joined as those of their workers",
                   "[onebit_adam][onebit_lamb][nodes]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  const auto options = options_of<O>();
  OneBitRanks<O> ranks(4, groups_of<O>(by_nodes<O>(options)), at::kFloat, 2);
  OneBitRanks<O> workers(2, groups_of<O>(options));
  REQUIRE(run_beside<O>(ranks, workers, 2, 0, 0, 9) == "");
  const auto states_of = [](const OneBitRanks<O>& run) {
    std::vector<NamedTensors> states;
    for (const auto& optimizer : run.optimizers) states.push_back(optimizer->export_rank_state());
    return states;
  };
  // Saved with the options of who goes on.
  const auto join = [](const O& optimizer, const std::vector<NamedTensors>& states) {
    NamedTensors state = optimizer.export_state();
    state["onebit/frozen_at"] = number_tensor(int64_t{kFreeze});
    return contract(optimizer).join_rank_states(state, states);
  };
  // Into three flat ranks, two nodes of three, and a single rank that compresses nothing.
  OneBitRanks<O> three(3, groups_of<O>(options)), six(6, groups_of<O>(by_nodes<O>(options)), at::kFloat, 3),
      one(1, groups_of<O>(OptionsOf<O>(options).compress_alone(false)));
  for (const OneBitRanks<O>* run : {&three, &six, &one}) {
    for (const auto& optimizer : run->optimizers) {
      const NamedTensors own = join(*optimizer, states_of(ranks));
      CHECK(differing_name(own, join(*optimizer, states_of(workers))) == "");
      CHECK_FALSE(own.empty());
    }
  }
  auto spoilt = states_of(ranks);
  spoilt[1]["onebit/ranks_of_a_worker"] = number_tensor(int64_t{0});
  CHECK(unless_sentence(refusal([&] { join(*three.optimizers[0], spoilt); }), {"ranks_of_a_worker", "0"}) ==
        "");
  const auto joined = join(*six.optimizers[4], states_of(ranks));
  CHECK(differing_name(joined, join(*six.optimizers[5], states_of(ranks))) == "onebit/rank");
}

TEMPLATE_TEST_CASE("nodes that differ, and state of other nodes, are refused",
                   "[onebit_adam][onebit_lamb][nodes][refusals]", OneBitAdam, OneBitLamb) {
  using O = TestType;
  const auto options = by_nodes<O>(options_of<O>());
  detail::Connection connection = detail::connect_in_process(1).front();
  connection.ranks_per_node = 0;
  const auto uneven = std::make_shared<Communicator>(connection, CommunicatorOptions());
  const std::vector<Tensor> parameters = {at::ones({4}).requires_grad_()};
  CHECK(unless_sentence(refusal([&] { O(parameters, options, uneven); }),
                        {"hierarchical(true)", "as many ranks"}) == "");
  CHECK(refusal([&] { O(parameters, options_of<O>(), uneven); }) == "<no exception>");

  OneBitRanks<O> pairs(4, groups_of<O>(options), at::kFloat, 2),
      whole(4, groups_of<O>(options), at::kFloat, 4), flat(4, groups_of<O>(options_of<O>()));
  for (OneBitRanks<O>* run : {&pairs, &whole, &flat}) take_steps(*run, 0, 7);
  for (OneBitRanks<O>* to : {&whole, &flat}) {
    auto state = cloned_state(pairs.optimizers[1]->export_state());
    for (auto& [name, tensor] : state) {  // which else would decide
      if (contains(name, "hierarchical")) tensor = number_tensor(to == &whole);
    }
    const auto errors = cloned_state(pairs.optimizers[1]->export_rank_state());
    CHECK(unless_refused_whole(*to, 1, {"2 ranks of a node share", "join_rank_states"},
                               [&] { to->optimizers[1]->import_states(state, errors); }) == "");
  }
  // Saved options decide, and here they cannot be.
  O alone(std::vector<Tensor>{at::ones({4}).requires_grad_()}, options_of<O>(), uneven);
  O saved(std::vector<Tensor>{at::ones({4}).requires_grad_()}, options);
  const NamedTensors before = cloned_state(alone.export_state());
  CHECK(unless_sentence(refusal([&] { alone.import_state(saved.export_state()); }), {"as many ranks"}) == "");
  CHECK(differing_name(before, alone.export_state()) == "");
}

}  // namespace pacer::testing::onebit_nodes
