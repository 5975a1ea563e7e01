// 1-bit optimizers whose momentum travels in several buckets: each bucket takes the steps that an optimizer
// of its own would take, one after the other; state goes on in other buckets.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_refusals.h"
#include "support/optimizers/onebit_sessions.h"

#include <pacer/hooks/gradient_clipping.h>

namespace pacer::testing::onebit_buckets {
namespace {

const std::vector<std::vector<int64_t>> kShapes = {{300}, {7}, {40, 50}, {0}, {3000}, {64}};

template <class O>
GroupsOf<O> groups_of(const OptionsOf<O>& options) {
  return {{kShapes, options}, {{{5}}, OptionsOf<O>(options).compress(false)}};
}

// The bytes of a bucket, and with which shapes buckets then begin: a bucket is full once it has so many.
struct Cut {
  int64_t bytes;
  std::vector<size_t> first;
};
const Cut kCuts[] = {
    {1, {0, 1, 2, 3, 5}},  // an empty tensor fills nothing
    {1200, {0, 1, 3, 5}},
    {1201, {0, 2, 3, 5}},
    {1 << 20, {0}},
};

// Of bucket b, an optimizer for each rank over copies of its parameters.
template <class O>
struct Apart {
  Apart(const OneBitRanks<O>& ranks, const Cut& cut, const OptionsOf<O>& options, int ranks_per_node)
      : world(Communicator::in_process(static_cast<int>(ranks.size()), by_nodes_of(ranks_per_node))) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      parameters.push_back(clones(ranks.parameters[rank]));
      optimizers.emplace_back();
      for (size_t b = 0; b < cut.first.size(); ++b) {
        const auto begin = parameters.back().begin() + static_cast<int64_t>(cut.first[b]);
        const size_t next = b + 1 < cut.first.size() ? cut.first[b + 1] : kShapes.size();
        const std::vector<Tensor> own(begin, parameters.back().begin() + static_cast<int64_t>(next));
        optimizers.back().push_back(std::make_unique<O>(own, options, world[rank]));
        places.resize(kShapes.size());
        for (size_t i = cut.first[b]; i < next; ++i) places[i] = {b, i - cut.first[b]};
      }
    }
  }
  std::string step(const std::vector<std::vector<Tensor>>& gradients) {
    for (size_t rank = 0; rank < parameters.size(); ++rank) {
      for (size_t i = 0; i < kShapes.size(); ++i)
        parameters[rank][i].mutable_grad() = gradients[rank][i].clone();
    }
    return first_of(run_ranks(static_cast<int>(parameters.size()), [&](int rank) {
      std::string said;
      HeardWarnings ear(said);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      for (auto& optimizer : optimizers[static_cast<size_t>(rank)]) optimizer->step();
    }));
  }
  // What differs from the ranks, which have the same parameters in buckets; "" where nothing does.
  std::string difference(const OneBitRanks<O>& ranks) const {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto state = ranks.optimizers[rank]->export_state();
      const auto errors = ranks.optimizers[rank]->export_rank_state();
      for (size_t i = 0; i < kShapes.size(); ++i) {
        const std::string name = "0." + std::to_string(i);
        if (!same_bits(ranks.parameters[rank][i], parameters[rank][i])) return "value of " + name;
        const auto [bucket, index] = places[i];
        const auto own_name = "0." + std::to_string(index);
        const auto own_state = optimizers[rank][bucket]->export_state();
        const auto own_errors = optimizers[rank][bucket]->export_rank_state();
        const auto differs = [&](const char* field, const NamedTensors& of_all, const NamedTensors& own) {
          const auto a = of_all.find(name + field), b = own.find(own_name + field);
          if (a == of_all.end() || b == own.end()) return (a == of_all.end()) != (b == own.end());
          return !same_bits(a->second, b->second);
        };
        for (const char* field : {"/exp_avg", "/exp_avg_sq", "/momentum_scale", "/lamb_factor", "/step"}) {
          if (differs(field, state, own_state)) return name + field;
        }
        for (const char* field : {"/worker_error", "/server_error"}) {
          if (differs(field, errors, own_errors)) return name + field + " at rank " + std::to_string(rank);
        }
      }
    }
    return "";
  }

  Ranks world;
  std::vector<std::vector<Tensor>> parameters;
  std::vector<std::vector<std::unique_ptr<O>>> optimizers;  // [rank][bucket]
  std::vector<std::pair<size_t, size_t>> places;            // [parameter]: bucket, and number there
};

template <class O>
void set_refresh(OptionsOf<O>& options) {
  if constexpr (std::is_same_v<O, OneBitAdam>) options.refresh_variance_every(3);
}

template <class O>
void check_cut(const Cut& cut, int world_size, int ranks_per_node, at::ScalarType dtype) {
  CAPTURE(cut.bytes, world_size, ranks_per_node, dtype);
  auto options = OptionsOf<O>(0.01).freeze_step(2).weight_decay(0.1).compress_alone(true);
  options.hierarchical(ranks_per_node > 0).block_scales(cut.bytes % 2 == 0);
  options.compress_vectors(true);
  set_refresh<O>(options);
  OneBitRanks<O> ranks(world_size, groups_of<O>(OptionsOf<O>(options).bucket_bytes(cut.bytes)), dtype,
                       ranks_per_node);
  Apart<O> apart(ranks, cut, options, ranks_per_node);
  for (int64_t t = 0; t < 9; ++t) {
    CAPTURE(t);
    const auto gradients = ranks.gradients(t);
    REQUIRE(ranks.step(gradients) == "");
    REQUIRE(apart.step(gradients) == "");
    REQUIRE(apart.difference(ranks) == "");
  }
  int64_t bytes = 0;
  double error = 0;
  for (const auto& optimizer : apart.optimizers[0]) {
    bytes += optimizer->bytes_sent();
    error = std::max(error, optimizer->compression_error());
  }
  CHECK(ranks.optimizers[0]->bytes_sent() == bytes);
  CHECK(ranks.optimizers[0]->compression_error() > 0);
  CHECK(ranks.optimizers[0]->compression_error() <= error);
}

template <class O>
std::vector<NamedTensors> rank_states_of(const OneBitRanks<O>& ranks) {
  std::vector<NamedTensors> states;
  for (const auto& optimizer : ranks.optimizers)
    states.push_back(cloned_state(optimizer->export_rank_state()));
  return states;
}

// Of compressed parameter i, over ranks: the mean of the workers' errors, and the server's.
std::pair<Tensor, Tensor> joined_errors(const std::vector<NamedTensors>& states, size_t i) {
  const std::string name = "0." + std::to_string(i);
  Tensor worker = at::zeros(kShapes[i], at::kDouble);
  std::vector<Tensor> server;
  for (const NamedTensors& state : states) {
    worker += state.at(name + "/worker_error").to(at::kDouble) / static_cast<double>(states.size());
    if (state.count(name + "/server_error") != 0) server.push_back(state.at(name + "/server_error"));
  }
  return {worker.to(at::kFloat), server.empty() ? Tensor(at::empty({0})) : at::cat(server)};
}

}  // namespace

TEMPLATE_TEST_CASE("each bucket takes the steps of an optimizer of its own, to the bit",
                   "[onebit_adam][onebit_lamb][buckets]", OneBitAdam, OneBitLamb) {
  for (const Cut& cut : kCuts) {
    check_cut<TestType>(cut, 3, 0, at::kFloat);
    check_cut<TestType>(cut, 1, 0, at::kBFloat16);
  }
  check_cut<TestType>(kCuts[1], 4, 2, at::kFloat);
  check_cut<TestType>(kCuts[2], 4, 2, at::kBFloat16);
}

TEMPLATE_TEST_CASE("gradients are clipped by one norm of all buckets", "[onebit_adam][onebit_lamb][buckets]",
                   OneBitAdam, OneBitLamb) {
  const auto options = OptionsOf<TestType>(0.01).freeze_step(1);
  std::vector<std::vector<double>> norms;
  for (const auto& bytes : {std::optional<int64_t>(), std::optional<int64_t>(1200)}) {
    OneBitRanks<TestType> ranks(2, {{kShapes, OptionsOf<TestType>(options).bucket_bytes(bytes)}});
    Sessions sessions(ranks, [](Session& session) { session.use(GradientClipping(0.1)); });
    norms.emplace_back();
    for (int64_t t = 0; t < 3; ++t) {
      REQUIRE(sessions.step(ranks, {ranks.gradients(t)}) == "");
      norms.back().push_back(sessions.of_rank[0]->gradient_norm());
      REQUIRE(norms.back().back() > 0.1);
    }
    REQUIRE(sessions.finish(ranks) == "");
  }
  for (size_t t = 0; t < 3; ++t) CHECK(norms[1][t] == Catch::Approx(norms[0][t]).epsilon(1e-12));
}

TEMPLATE_TEST_CASE("non-finite gradients of one bucket change nothing in any",
                   "[onebit_adam][onebit_lamb][buckets]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(2, groups_of<TestType>(frozen_at_two<TestType>().bucket_bytes(1)));
  take_steps(ranks, 0, 4);
  const auto before = everything(ranks);
  auto gradients = ranks.gradients(4);
  gradients[1][4].view({-1})[17] = std::nan("");
  REQUIRE(ranks.step(gradients) == "");
  CHECK(first_change(before, everything(ranks)) == "");
  for (const auto& optimizer : ranks.optimizers) CHECK(optimizer->skipped_steps() == 1);
  take_steps(ranks, 5, 7);
  CHECK(first_change(before, everything(ranks)) != "");
}

TEMPLATE_TEST_CASE("a bucket without any variance gets the floor of all of them",
                   "[onebit_adam][onebit_lamb][buckets]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  std::vector<std::string> said;
  for (const auto& bytes : {std::optional<int64_t>(), std::optional<int64_t>(1)}) {
    OneBitRanks<TestType> ranks(
        1, {{{{256}, {128}}, O(0.01).freeze_step(2).compress_alone(true).bucket_bytes(bytes)}});
    for (int64_t t = 0; t < 2; ++t) {
      auto gradients = ranks.gradients(t);
      gradients[0][1].zero_();
      REQUIRE(ranks.step(gradients) == "");
    }
    CHECK(ranks.optimizers[0]->phase() == OneBitPhase::compressed);
    said.push_back(ranks.said[0]);
    CHECK(contains(said.back(), "100 %"));
    // Its first gradients would be divided by eps alone.
    const Tensor before = ranks.parameters[0][1].detach().clone();
    take_steps(ranks, 2, 3);
    CHECK((ranks.parameters[0][1].detach() - before).abs().max().template item<double>() < 1);
  }
  CHECK(said[0] == said[1]);
}

TEMPLATE_TEST_CASE("a run in buckets goes on from its state to the bit",
                   "[onebit_adam][onebit_lamb][buckets]", OneBitAdam, OneBitLamb) {
  for (const int64_t steps : {1, 2, 3, 6}) {
    CAPTURE(steps);
    const auto groups = groups_of<TestType>(frozen_at_two<TestType>().bucket_bytes(1200));
    OneBitRanks<TestType> ranks(3, groups), unbroken(3, groups);
    take_steps(ranks, 0, steps);
    take_steps(unbroken, 0, steps);
    ranks.resume();
    take_steps(ranks, steps, steps + 3);
    take_steps(unbroken, steps, steps + 3);
    CHECK(first_change(everything(unbroken), everything(ranks)) == "");
  }
}

TEMPLATE_TEST_CASE("errors are cut anew for other buckets and other numbers of ranks",
                   "[onebit_adam][onebit_lamb][buckets]", OneBitAdam, OneBitLamb) {
  using Bytes = std::optional<int64_t>;
  const auto options = frozen_at_two<TestType>().compress_alone(true);
  const auto with = [&](Bytes bytes) {
    return groups_of<TestType>(OptionsOf<TestType>(options).bucket_bytes(bytes));
  };
  const std::tuple<int, Bytes, int, Bytes> changes[] = {{3, {}, 3, 1200}, {3, 1200, 3, {}}, {2, 1, 2, 1201},
                                                        {3, 1, 2, 1},     {2, {}, 4, 1},    {4, 1200, 1, {}}};
  for (const auto& [ranks_before, bytes_before, ranks_after, bytes_after] : changes) {
    CAPTURE(ranks_before, bytes_before.value_or(0), ranks_after, bytes_after.value_or(0));
    OneBitRanks<TestType> from(ranks_before, with(bytes_before)), to(ranks_after, with(bytes_after));
    take_steps(from, 0, 6);
    const NamedTensors state = cloned_state(from.optimizers[0]->export_state());
    CHECK(state.count("group/0/bucket_bytes") == 0);
    const auto errors = rank_states_of(from);
    for (size_t rank = 0; rank < to.size(); ++rank) {
      TestType& optimizer = *to.optimizers[rank];
      if (ranks_before == ranks_after) {
        CHECK_FALSE(contract(optimizer).fits_rank_state(state, errors[rank]));
        CHECK(unless_refused_whole(to, rank, {"other buckets", "give bucket_bytes"},
                                   [&] { optimizer.import_states(state, errors[rank]); }) == "");
      }
      const NamedTensors joined = contract(optimizer).join_rank_states(state, errors);
      CHECK(contract(optimizer).fits_rank_state(state, joined));
      optimizer.import_states(state, joined);
      CHECK(differing_name(joined, optimizer.export_rank_state()) == "");
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < to.parameters[rank].size(); ++i) {
        to.parameters[rank][i].copy_(from.parameters[0][i]);
      }
    }
    const auto after = rank_states_of(to);
    for (size_t i = 0; i < kShapes.size(); ++i) {
      CAPTURE(i);
      CHECK(same_bits(joined_errors(errors, i).second, joined_errors(after, i).second));
      CHECK(at::allclose(joined_errors(errors, i).first, joined_errors(after, i).first, 1e-6, 1e-9));
    }
    take_steps(to, 6, 9);
    for (const auto& of_rank : to.parameters) CHECK(same_bits(to.parameters[0], of_rank));
  }
}

TEMPLATE_TEST_CASE("bucket_bytes is checked, the same in all groups and on all ranks, and stays",
                   "[onebit_adam][onebit_lamb][buckets][refusals]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  const auto base = frozen_at_two<TestType>();
  for (const int64_t bytes : {0, -1}) {
    CHECK(unless_sentence(refusal_of<TestType>(O(base).bucket_bytes(bytes)),
                          {"bucket_bytes must be at least 1 byte", std::to_string(bytes)}) == "");
  }
  CHECK(unless_groups_must_agree<TestType>(base, O(base).bucket_bytes(100)) == "");

  OneBitRanks<TestType> ranks(2, groups_of<TestType>(base));
  take_steps(ranks, 0, 1);
  for (auto& group : ranks.optimizers[0]->param_groups()) static_cast<O&>(group.options()).bucket_bytes(100);
  CHECK(unless_refused_whole(ranks, 0, {"changed after step 1", "bucket_bytes"},
                             [&] { contract(*ranks.optimizers[0]).prepare({}); }) == "");

  // Who cuts otherwise is found before the first signs travel.
  auto world = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    std::vector<Tensor> own;
    for (const auto& shape : kShapes) own.push_back(at::ones(shape).requires_grad_());
    TestType optimizer(own, O(base).compress_vectors(true).bucket_bytes(rank == 0 ? 1200 : 1 << 20),
                       world[static_cast<size_t>(rank)]);
    for (uint64_t t = 0; t < 3; ++t) {
      for (size_t i = 0; i < own.size(); ++i) own[i].mutable_grad() = onebit_gradient(own[i], 0, t, i);
      optimizer.step();
    }
  });
  for (const std::string& message : messages) {
    CAPTURE(message);
    CHECK(contains(message, "bucket_bytes"));
    CHECK(contains(message, "1200"));
  }
}

}  // namespace pacer::testing::onebit_buckets
