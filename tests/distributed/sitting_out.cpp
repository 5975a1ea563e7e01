// Parameters that join, leave or sit out on processes: what ranks that are threads do with them, on the
// back-end and the devices of a real run.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "replicas.h"
#include "scenario.h"
#include "support/parallel/rank_gradients.h"
#include "support/parallel/rank_trainers.h"
#include "support/schedulers/gated_stack.h"

namespace pacer::testing {
namespace {

using rank_gradients::add_last;
using rank_gradients::MakeOptimizer;
using rank_gradients::Rank;

std::shared_ptr<Communicator> join(const Player& player) {
  return std::make_shared<Communicator>(player.connect(), player.options());
}

// A change to the parameters between two micro-steps of a window, beside one process that makes it there.
void join_between_micro_steps(const std::shared_ptr<Communicator>& world, const std::string& name,
                              const MakeOptimizer& make, const std::string& change) {
  constexpr int64_t kMicroSteps = 2;
  const int64_t ranks = world->world_size();
  const auto use = [](int64_t count) {
    return [=](Session& session, rank_gradients::Model&) { session.use(GradientAccumulation(count)); };
  };
  Rank own(world, make, use(kMicroSteps), change == "add");
  Rank alone(Communicator::alone(world->device()), make, use(kMicroSteps * ranks), change == "add");
  const auto make_change = [&](Rank& r) {
    if (change == "add") {
      add_last(r);
    } else {
      r.parameter(6).requires_grad_(change == "unfreeze");
    }
  };
  for (Rank* r : {&own, &alone}) {
    if (change == "unfreeze") r->parameter(6).requires_grad_(false);
  }
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t k = 0; k < kMicroSteps; ++k) {
      if (t == 1 && k == 1) make_change(own);
      own.micro_step((kMicroSteps * t + k) * ranks + world->rank());
    }
    for (int64_t k = 0; k < kMicroSteps * ranks; ++k) {
      if (t == 1 && k == ranks) make_change(alone);
      alone.micro_step(kMicroSteps * ranks * t + k);
    }
  }
  for (Rank* r : {&own, &alone}) r->session->finish();
  const std::string what = name + ", " + change;
  expect_replicas(*world, *own.model, what);
  const double away = rank_gradients::distance(own, alone);
  // Gradients are added in another order; a micro-batch that is missing would be a whole step of 0.01 away.
  expect(away < 1e-5, what, ": weights near those of one process, not ", away, " away");
}

// Compressed from step 3 on: a parameter that is unfrozen inside a window, and a group that is added there.
void join_compressed(const std::shared_ptr<Communicator>& world, bool overlap, bool adds) {
  Rank r(
      world, rank_gradients::onebit(overlap),
      [](Session& session, rank_gradients::Model&) { session.use(GradientAccumulation(2)); }, adds);
  if (!adds) r.parameter(6).requires_grad_(false);
  for (int64_t t = 0; t < 8; ++t) {
    r.micro_step(4 * t + world->rank());
    if (t == 5 && adds) {
      add_last(r);
    } else if (t == 5) {
      r.parameter(6).requires_grad_(true);
    }
    r.micro_step(4 * t + 2 + world->rank());
  }
  r.session->finish();
  expect_replicas(*world, *r.model, "compressed");
}

void parameters_join(const Player& player) {
  const auto world = join(player);
  const std::vector<std::pair<std::string, MakeOptimizer>> optimizers = {
      {"torch", rank_gradients::kAdamW},
      {"fused", rank_gradients::kFused},
      {"1-bit, warm-up", [](const auto& parameters, const auto& ranks) {
         return std::make_unique<OneBitAdam>(parameters, OneBitAdamOptions(0.01).freeze_step(100), ranks);
       }}};
  for (const auto& [name, make] : optimizers) {
    for (const char* change : {"unfreeze", "freeze", "add"})
      join_between_micro_steps(world, name, make, change);
  }
  for (const bool overlap : {false, true}) join_compressed(world, overlap, /*adds=*/false);
  for (const bool overlap : {false, true}) {  // each ends its world
    Player met = player;
    met.arguments["file"] += overlap ? "-overlap" : "-add";
    std::string words = "nothing";
    try {
      join_compressed(join(met), overlap, /*adds=*/true);
    } catch (const Error& error) {
      words = error.what();
    }
    expect(words.find("a parameter group was added after the variance froze") != std::string::npos,
           "a group added in a compressed run to be refused, but heard ", words);
  }
}

// Two layers share their parameters: where both are dropped these have a gradient of zero, as alone.
void drop_shared_layers(const std::shared_ptr<Communicator>& world) {
  const auto trained = [](const std::shared_ptr<Communicator>& ranks, bool unused_is_zero) {
    GatedStack model(std::vector<int64_t>{0, 1, 0});
    model->to(ranks->device());
    FusedAdamW optimizer(model->parameters(), FusedAdamWOptions(0.01).weight_decay(0.1));
    Session session(*model, optimizer, ranks);
    session.use(DataParallel(DataParallelOptions().unused_is_zero(unused_is_zero))).use(model->layer_drop);
    int both_dropped = 0;
    for (int step = 0; step < 20; ++step) {
      auto [x] = session.begin(torch::ones({2, kWidth}));
      both_dropped += !model->layer_drop->keeps(0) && !model->layer_drop->keeps(2);
      session.backward(model->loss(x));
      session.step();
    }
    session.finish();
    expect(both_dropped > 3, "both layers dropped in more than 3 steps, not ", both_dropped);
    return model->parameters();
  };
  const auto alone = trained(Communicator::alone(world->device()), false);
  for (const bool unused_is_zero : {false, true}) {
    const auto weights = trained(world, unused_is_zero);
    if (world->world_size() == 2) {  // a mean of equal gradients is exact
      expect(same_bits(alone, weights), "the bits of one process where both layers that share are dropped");
    } else {
      expect(distance(alone, weights) < 1e-5,
             "one process's weights where both layers that share are dropped");
    }
  }
}

std::vector<RankSetup> reductions(bool unused_is_zero) {
  const auto options = [=] { return DataParallelOptions().unused_is_zero(unused_is_zero); };
  std::vector<RankSetup> setups;
  for (const auto& one :
       {options(), options().bucket_bytes(1).first_bucket_bytes(1), options().in_place(true)}) {
    setups.emplace_back();
    setups.back().data_parallel = one;
  }
  for (const Sharded what : {Sharded::state, Sharded::gradients}) {
    setups.emplace_back();
    setups.back().reduction = [=](Session& session) {
      session.use(Shards(ShardsOptions().what(what).unused_is_zero(unused_is_zero)));
    };
  }
  for (RankSetup& setup : setups) setup.options.weight_decay(0.3);
  return setups;
}

void micro_step(RankTrainer& t, bool uses_all) {
  auto [x] = t.session->begin(t.inputs);
  const Tensor first = t.model->children().front()->as<torch::nn::Linear>()->forward(x);
  t.session->backward((uses_all ? t.model->forward(x) : first).square().mean());
  t.session->step();
}

// What no rank has used sits the step out; what one has used gets the mean with zeros and moves everywhere.
void leave_layers_unused(const std::shared_ptr<Communicator>& world) {
  for (const RankSetup& setup : reductions(/*unused_is_zero=*/true)) {
    RankTrainer t(setup, world);
    const auto weights = [&] {
      const auto whole = t.session->whole_parameters();
      return t.snapshot();
    };
    for (int i = 0; i < 2; ++i) micro_step(t, true);
    const auto before = weights();
    for (int i = 0; i < 3; ++i) micro_step(t, false);
    const auto unused = weights();
    expect(!same_bits(before[0], unused[0]), "what all ranks use to move");
    for (const size_t i : {2, 3}) expect(same_bits(before[i], unused[i]), "what no rank uses to sit out");
    micro_step(t, world->rank() == 0);
    const auto after = weights();
    for (const size_t i : {2, 3}) expect(!same_bits(unused[i], after[i]), "what one rank uses to move");
    t.session->finish();
    expect_replicas(*world, *t.model, "after a step of which one rank used all");
  }
}

// Without unused_is_zero all ranks hear of it. Each of these ends its world.
void refuse_unused(const Player& player) {
  int number = 0;
  for (const RankSetup& setup : reductions(/*unused_is_zero=*/false)) {
    Player met = player;
    met.arguments["file"] += "-" + std::to_string(number++);
    RankTrainer t(setup, join(met));
    std::string words = "nothing";
    try {
      micro_step(t, true);
      micro_step(t, player.rank != 0);
      t.session->finish();  // where ranks need not wait for each other before
    } catch (const Error& error) {
      words = error.what();
    }
    expect(words.find("1.weight") != std::string::npos && words.find("unused_is_zero") != std::string::npos,
           "an unused parameter to be refused by name, but heard ", words);
  }
}

void parameters_sit_out(const Player& player) {
  const auto world = join(player);
  drop_shared_layers(world);
  leave_layers_unused(world);
  refuse_unused(player);
}

const AddScenario kJoin("parameters_join", parameters_join);
const AddScenario kSitOut("parameters_sit_out", parameters_sit_out);

}  // namespace
}  // namespace pacer::testing
