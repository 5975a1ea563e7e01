// Training on processes: equal, to the bit, to one process that takes the shards in rank order (ordered
// sums); identical replicas at every step; resumed to the bit. Each rank computes the reference for itself.
#include <algorithm>
#include <cmath>
#include <optional>
#include <thread>

#include <pacer/files/checkpoint_folder.h>
#include <pacer/files/checksum.h>

#include "optimizers.h"
#include "scenario.h"
#include "support/collectives/ranks.h"
#include "support/parallel/shard_reference.h"
#include "support/session/small_run.h"

namespace pacer::testing {
namespace {

using Hooks = std::vector<RegisteredHook>;

std::shared_ptr<Communicator> join(const Player& player, bool ordered) {
  auto options = player.options();
  options.ordered_sum(ordered);
  if (player.world_size == 1)
    return Communicator::alone(player.has("nccl") ? at::Device("cuda:0") : at::kCPU);
  return std::make_shared<Communicator>(detail::connect(player.settings(), options), options);
}

Hooks hooks_named(const std::vector<std::string>& names) {
  Hooks hooks;
  for (const RegisteredHook& hook : all_hooks()) {
    if (std::count(names.begin(), names.end(), hook.name)) hooks.push_back(hook);
  }
  return hooks;
}

std::string hash_of(const detail::TrainingState& state) {
  Checksum sum;
  for (const auto part : {&detail::TrainingState::model, &detail::TrainingState::optimizer}) {
    for (const auto& [name, tensor] : state.*part) {
      const Tensor host = tensor.cpu().contiguous();
      sum.add(name.data(), name.size());
      sum.add(host.const_data_ptr(), static_cast<size_t>(host.numel()) * host.element_size());
    }
  }
  return sum.hex();
}

void expect_identical_replicas(Communicator& world, const detail::TrainingState& state, int64_t step) {
  const std::vector<std::string> hashes = world.exchange(hash_of(state));
  for (const std::string& hash : hashes) expect(hash == hashes[0], "equal replicas after step ", step);
}

std::unique_ptr<SmallRun> make_run(const RegisteredOptimizer& optimizer, const Hooks& hooks,
                                   const std::shared_ptr<Communicator>& world, double dropout = 0,
                                   std::optional<bool> in_place = std::nullopt) {
  auto run = std::make_unique<SmallRun>(optimizer, hooks, dropout, world);
  if (world->world_size() > 1) {
    run->session->use(
        DataParallel(DataParallelOptions().bucket_bytes(600).first_bucket_bytes(100).in_place(in_place)));
  }
  return run;
}

// `steps` steps beside the reference.
void train_beside_reference(const std::shared_ptr<Communicator>& world, const RegisteredOptimizer& optimizer,
                            const Hooks& hooks, int64_t steps) {
  auto run = make_run(optimizer, hooks, world);
  SmallRun reference(optimizer, hooks, /*dropout=*/0, Communicator::alone(world->device()));
  reference.shards = world->world_size();
  reference.session->use(std::make_shared<ShardReference>(reference.model, world->world_size()));
  for (int64_t step = 0; step < steps; ++step) {
    run->step();
    reference.step();
    const auto state = run->state(), wanted = reference.state();
    std::string difference = first_difference(state.model, wanted.model);
    if (difference.empty()) difference = first_difference(state.optimizer, wanted.optimizer);
    expect(difference.empty(), "no difference from one process after step ", step, ", but ", difference,
           " differs");
    expect_identical_replicas(*world, state, step);
  }
  run->finish();
}

const std::vector<std::string> kTogether = {"accumulation", "clipping", "bf16", "layer drop", "curriculum"};

// Every pair of the hooks that matter most, in ordered mode.
void train_pairs(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  for (size_t a = 0; a < kTogether.size(); ++a) {
    for (size_t b = a; b < kTogether.size(); ++b) {
      train_beside_reference(world, optimizer_named("FusedAdamW"), hooks_named({kTogether[a], kTogether[b]}),
                             player.number("steps", 10));
      if (world->rank() == 0) say("pair " + kTogether[a] + ", " + kTogether[b]);
    }
  }
}

// All of them at once, for long.
void train_long(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  train_beside_reference(world, optimizer_named("FusedAdamW"), hooks_named(kTogether),
                         player.number("steps"));
}

// Shards beside the reference: with the hooks that matter most and both ways to accumulate, which only add up
// alike where gradients travel once a step. Given ranks of a node, over nodes.
void train_shards(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  const auto per_node = static_cast<int>(player.number("ranks_per_node", 0));
  const ShardGroup over = per_node > 0 ? ShardGroup::node : ShardGroup::world;
  const auto hooks = hooks_named(kTogether);
  std::vector<std::string> names = {"FusedAdamW", "FusedAdamW bf16 remainder", "FusedAdamW bf16 stochastic"};
  // On a GPU the last bits of its products depend on how many a rank makes at once.
  if (world->device().is_cpu()) names.emplace_back("Muon");
  for (const std::string& name : names) {
    for (const Sharded what : {Sharded::state, Sharded::gradients, Sharded::parameters}) {
      auto chosen = hooks;
      if (what != Sharded::state) chosen.erase(chosen.begin());
      SmallRun run(optimizer_named(name), chosen, /*dropout=*/0, world);
      const auto options = ShardsOptions().over(over);
      if (what == Sharded::parameters) {
        run.session->use(Shards(run.model->stack, options)).use(Recompute(run.model->stack));
      } else {
        run.session->use(Shards(ShardsOptions(options).unit_bytes(600).what(what)));
      }
      SmallRun reference(optimizer_named(name), chosen, /*dropout=*/0, Communicator::alone(world->device()));
      reference.shards = world->world_size();
      reference.session->use(
          std::make_shared<ShardReference>(reference.model, world->world_size(), per_node));
      if (what == Sharded::parameters) reference.session->use(Recompute(reference.model->stack));
      for (int64_t step = 0; step < player.number("steps"); ++step) {
        run.step();
        reference.step();
        const auto whole = run.session->whole_parameters();
        const std::string difference = first_difference(run.state().model, reference.state().model);
        expect(difference.empty(), "no difference from one process after step ", step, ", but ", difference,
               " differs");
      }
      run.finish();
      if (world->rank() == 0) say(std::string("shards ") + name);
    }
  }
}

// Each of W - 1 additions rounds a partial sum, at most the sum of all magnitudes, by 2^-24 of it.
void expect_sum(Communicator& world, const Tensor& sum, const Tensor& own) {
  const int64_t count = own.numel();
  Tensor all = torch::empty({world.world_size() * count}, own.options());
  world.all_gather(all, own.flatten()).wait();
  const Tensor terms = all.view({world.world_size(), count}).to(at::kDouble);
  const Tensor bound = terms.abs().sum(0) * ((world.world_size() - 1) * std::ldexp(1.001, -24));
  expect((sum.flatten().to(at::kDouble) - terms.sum(0)).abs().le(bound).all().item<bool>(), "sums of ", count,
         " elements within the bound");
}

// Sums of gradients, in place or by way of flat memory: within the bound, and the same bits on all ranks.
void reduce_gradients(const std::shared_ptr<Communicator>& world, bool in_place) {
  const auto options = at::TensorOptions().device(world->device());
  std::vector<std::pair<std::string, Tensor>> named;
  for (const int64_t size : {5, 70'000, 1, 0, 1'000'003, 33}) {
    named.emplace_back(std::to_string(named.size()), torch::zeros({size}, options).requires_grad_());
  }
  GradientBucketer bucketer(named, world,
                            BucketOptions().bucket_bytes(300'000).first_bucket_bytes(100).in_place(in_place));
  for (int step = 0; step < 5; ++step) {
    std::vector<Tensor> own;
    Tensor loss = torch::zeros({}, options);
    for (const auto& item : named) {
      own.push_back(torch::randn(item.second.sizes(), options));
      loss = loss + (item.second * own.back()).sum();
    }
    bucketer.begin_backward();
    loss.backward();
    bucketer.end_backward();
    bucketer.wait();
    detail::TrainingState sums;
    for (size_t i = 0; i < named.size(); ++i) {
      sums.model[named[i].first] = named[i].second.grad();
      if (own[i].numel() > 0) expect_sum(*world, named[i].second.grad(), own[i]);
    }
    expect_identical_replicas(*world, sums, step);
    for (auto& item : named) item.second.mutable_grad().reset();
  }
}

// The back-end's own order of sums: replicas stay identical, and each sum is within the bound of any order.
void train_unordered(const Player& player) {
  const auto world = join(player, /*ordered=*/false);
  for (const std::optional<bool> in_place :
       {std::optional<bool>(), std::optional(true), std::optional(false)}) {
    auto run =
        make_run(optimizer_named("FusedAdamW"), hooks_named(kTogether), world, /*dropout=*/0, in_place);
    for (int64_t step = 0; step < player.number("steps"); ++step) {
      run->step();
      expect_identical_replicas(*world, run->state(), step);
    }
    run->finish();
  }
  for (const bool in_place : {true, false}) reduce_gradients(world, in_place);
  for (const int64_t count : {1, 1000, 100'003}) {
    const Tensor own = torch::randn({count}, at::TensorOptions().device(world->device()));
    const Tensor sum = own.clone();
    world->all_reduce(sum).wait();
    expect_sum(*world, sum, own);
    const Tensor rest = own.narrow(0, 0, count / 2).clone();
    world->all_reduce_coalesced({sum.copy_(own), rest}).wait();
    expect_sum(*world, sum, own);
    if (count > 1) expect_sum(*world, rest, own.narrow(0, 0, count / 2));
  }
}

// P3: what is compressed has the same bits on every back-end, here beside threads of this process.
void train_compressed(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  const Hooks hooks = hooks_named({"accumulation", "clipping", "layer drop", "curriculum"});
  for (const char* name : {"OneBitAdam", "OneBitAdam refreshed", "OneBitLamb", "OneBitAdam by nodes",
                           "OneBitLamb by nodes, bf16"}) {
    const RegisteredOptimizer optimizer = optimizer_named(name);
    const auto run = make_run(optimizer, hooks, world);
    std::vector<std::unique_ptr<SmallRun>> threads;
    for (const auto& rank : Communicator::in_process(world->world_size(), player.options())) {
      threads.push_back(
          std::make_unique<SmallRun>(optimizer, hooks, /*dropout=*/0, rank, /*own_random=*/false));
    }
    for (int64_t step = 0; step < player.number("steps"); ++step) {
      run->step();
      const auto messages =
          run_ranks(world->world_size(), [&](int rank) { threads[static_cast<size_t>(rank)]->step(); });
      expect(first_of(messages).empty(), "threads to train, but ", first_of(messages));
      const auto state = run->state();
      const auto wanted = threads[static_cast<size_t>(world->rank())]->state();
      for (const auto part : {&detail::TrainingState::model, &detail::TrainingState::optimizer,
                              &detail::TrainingState::rank_optimizer}) {
        const std::string difference = first_difference(state.*part, wanted.*part);
        expect(difference.empty(), "no difference from threads after step ", step, ", but ", difference,
               " differs");
      }
      expect_identical_replicas(*world, state, step);
    }
    run->finish();
  }
}

// Trains, forgets all after step 6, resumes, and compares every later step of every rank.
void resume(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  const std::string folder = player.text("folder");
  const Hooks hooks = hooks_named(
      {"accumulation", "clipping", "fp16", "layer drop", "curriculum", "learning rate", "sampler"});
  int number = 0;
  for (const char* name :
       {"FusedAdamW", "FusedAdamW bf16 stochastic", "SGD", "OneBitAdam", "OneBitAdam refreshed", "OneBitLamb",
        "OneBitAdam by nodes", "OneBitMuon", "Muon shared"}) {
    const RegisteredOptimizer optimizer = optimizer_named(name);
    const std::string root = folder + "/" + std::to_string(number++);
    const auto make = [&] {
      auto run = make_run(optimizer, hooks, world, /*dropout=*/0.1);
      run->seed(100 + static_cast<uint64_t>(world->rank()));  // each rank drops other units
      run->session->use(Checkpoints(CheckpointsOptions(root).every(3).keep(9)));
      return run;
    };
    std::vector<detail::TrainingState> states;
    {
      const auto run = make();
      for (int step = 0; step < 12; ++step) {
        run->step();
        states.push_back(run->state());
      }
      run->finish();
    }
    world->barrier();
    if (world->rank() == 0) {
      for (const CheckpointInfo& checkpoint : list_checkpoints(root)) {
        if (checkpoint.step > 6) remove_folder(posix_file_system(), checkpoint.folder);
      }
    }
    world->barrier();
    const auto run = make();
    expect(run->resume() == 6, "to resume after step 6");
    for (size_t step = 6; step < 12; ++step) {
      run->step();
      const std::string difference = first_difference(run->state(), states[step]);
      expect(difference.empty(), "no difference after step ", step, ", but ", difference, " differs");
    }
    run->finish();
  }
}

// Trains up to `steps`, or until a signal stops it: says each step, and at the end where it is.
void stop_by_signal(const Player& player) {
  const auto world = join(player, /*ordered=*/true);
  auto run = make_run(optimizer_named("OneBitAdam"), hooks_named({"accumulation", "clipping", "sampler"}),
                      world, /*dropout=*/0.1);
  run->seed(100 + static_cast<uint64_t>(world->rank()));
  run->session->use(Checkpoints(CheckpointsOptions(player.text("folder")).every(1000).stop_on_signal(true)));
  say("resumed " + std::to_string(run->resume().value_or(0)));
  const Session& session = *run->session;
  while (session.progress().step < player.number("steps") && !session.should_stop()) {
    run->step();
    say("step " + std::to_string(session.progress().step));
    if (player.has("pause")) std::this_thread::sleep_for(std::chrono::milliseconds(player.number("pause")));
  }
  run->finish();
  const auto state = run->state();
  say("ended " + std::to_string(session.progress().step) + " " + hash_of(state));
}

const AddScenario kPairs("train_pairs", train_pairs);
const AddScenario kLong("train_long", train_long);
const AddScenario kShards("train_shards", train_shards);
const AddScenario kUnordered("train_unordered", train_unordered);
const AddScenario kCompressed("train_compressed", train_compressed);
const AddScenario kResume("train_resume", resume);
const AddScenario kStop("train_stop", stop_by_signal);

}  // namespace
}  // namespace pacer::testing
