// What is refused with Shards, and what ranks are told who use it wrong.
#include <sstream>

#include <torch/serialize.h>

#include <pacer/parallel/shards.h>

#include "support/catch.h"
#include "support/parallel/rank_trainers.h"
#include "support/parallel/shard_runs.h"
#include "support/session/mistakes.h"

namespace pacer::testing {

TEST_CASE("mistakes with Shards are told in a sentence", "[shards][mistakes]") {
  using namespace shards;
  const auto train = [](
                         const std::function<void(RankTrainer&)>& then,
                         const std::function<void(RankSetup&)>& set_up = [](RankSetup&) {}) {
    return [=] {
      RankSetup setup;
      setup.reduction = [](Session& session) { session.use(Shards()); };
      set_up(setup);
      auto trainers = trainers_of(std::vector<RankSetup>(2, setup));
      const std::string message = first_of(run_all(trainers, [&](RankTrainer& t, int) {
        t.step();
        then(t);
      }));
      if (!message.empty()) throw Error(message);
    };
  };
  const auto with_optimizer = [](const char* name) {
    return [name] {
      for (const RegisteredOptimizer& entry : all_optimizers()) {
        if (entry.name != name) continue;
        SmallRun run(entry, {}, 0, Communicator::in_process(1)[0], false);
        run.session->use(Shards());
      }
    };
  };
  const std::vector<Mistake> mistakes = {
      {"torch's AdamW", {"whole parameters", "FusedAdamW"}, with_optimizer("AdamW")},
      {"1-bit Adam",
       {"errors of its own for all parameters", "hierarchical(true)"},
       with_optimizer("OneBitAdam")},
      {"Schedule-Free AdamW",
       {"in evaluation it makes whole parameters of their averages"},
       with_optimizer("ScheduleFreeAdamW")},
      {"no Communicator",
       {"hook shards", "Communicator"},
       [] {
         SmallModel model = small_model();
         FusedAdamW optimizer(model->parameters());
         Session(*model, optimizer).use(Shards());
       }},
      {"beside DataParallel",
       {"data_parallel", "shards", "use one of them"},
       train([](RankTrainer&) {},
             [](RankSetup& s) { s.hooks = [](Session& session) { session.use(DataParallel()); }; })},
      {"with CudaGraph",
       {"CudaGraph"},
       train([](RankTrainer&) {},
             [](RankSetup& s) { s.hooks = [](Session& session) { session.use(CudaGraph()); }; })},
      {"units of nothing",
       {"unit_bytes", "at least 1"},
       train([](RankTrainer&) {},
             [](RankSetup& s) {
               s.reduction = [](Session& session) { session.use(Shards(ShardsOptions().unit_bytes(0))); };
             })},
      {"other units on one rank",
       {"disagree", "units of"},
       [] {
         RankSetup a, b;
         a.reduction = [](Session& session) { session.use(Shards()); };
         b.reduction = [](Session& session) { session.use(Shards(ShardsOptions().unit_bytes(100))); };
         auto trainers = trainers_of({a, b});
         const auto messages = run_all(trainers, [](RankTrainer& t, int) { t.step(); });
         require(messages[0] == messages[1], "the ranks say different things: ", messages[0], messages[1]);
         throw Error(messages[0]);
       }},
      {"a layer frozen later", {"frozen", "new Session"}, train([](RankTrainer& t) {
         t.model->parameters().front().requires_grad_(false);
         t.step();
       })},
      {"moved to another dtype", {"0.weight", "was moved"}, train([](RankTrainer& t) {
         t.model->parameters().front().set_data(torch::ones({6, 4}));
         t.step();
       })},
      {"the last parameter moved", {"was moved"}, train([](RankTrainer& t) {
         const Tensor last = t.model->parameters().back();
         last.set_data(last.detach().clone());
         t.step();
       })},
      {"a gradient by hand", {"gradient of its own", "0.weight"}, train([](RankTrainer& t) {
         t.begin_and_backward();
         t.model->parameters().front().mutable_grad() = torch::ones({6, 4});
         t.session->step();
       })},
      {"a step without the Session", {"leave steps to the Session"}, train([](RankTrainer& t) {
         t.optimizer->step();
       })},
      {"a Session without Shards afterwards", {"use Shards again"}, train([](RankTrainer& t) {
         t.session->finish();
         Session next(*t.model, *t.optimizer, t.parts->shared_world());
         (void)next.begin(t.inputs);
       })},
      {"other parts in a later Session", {"in other parts"}, train([](RankTrainer& t) {
         t.session->finish();
         const auto world = t.parts->shared_world();
         t.session.reset();
         Session next(*t.model, *t.optimizer, world);
         next.use(Shards(ShardsOptions().unit_bytes(1)));
         (void)next.begin(t.inputs);
       })},
      {"saved as an archive", {"whole parameters", "Checkpoints"}, train([](RankTrainer& t) {
         std::ostringstream out;
         torch::save(*t.optimizer, out);
       })},
      {"a parameter that backward does not reach", {"not at all", "0.weight"}, train([](RankTrainer& t) {
         auto [x] = t.session->begin(torch::ones({2, 6}));
         t.session->backward(t.model[1]->as<torch::nn::Linear>()->forward(x).square().mean());
       })},
      {"one that is not contiguous",
       {"not contiguous", "0.weight"},
       train([](RankTrainer&) {},
             [](RankSetup& s) {
               s.change_model = [](torch::nn::Sequential& model) {
                 model->parameters().front().set_data(torch::ones({4, 6}).t());
               };
             })},
  };
  CHECK(faults_of(mistakes) == "");
}

TEST_CASE("mistakes with Shards of parameters are told in a sentence", "[shards][blocks][mistakes]") {
  using namespace shards;
  // What the first of two ranks throws that does so, with a step behind them.
  const auto train = [](const std::function<void(SmallRun&)>& then,
                        const Adds& add = sharded(Sharded::parameters)) {
    return [=] {
      const CapturedStderr quiet;
      Runs runs = runs_of(shared_optimizers()[0], {}, 2, add);
      const std::string message = on_all(runs, [&](SmallRun& run) {
        run.step();
        try {
          then(run);
        } catch (
            const c10::Error& error) {  // of LibTorch's operations, whose messages go on with a back trace
          throw Error(error.what_without_backtrace());
        }
      });
      if (!message.empty()) throw Error(message);
    };
  };
  const auto made = [](const ShardsOptions& options, bool with_blocks) {
    return [=] {
      SmallModel model = small_model();
      with_blocks ? Shards(model->stack, options) : Shards(options);
    };
  };
  const TemporaryFolder folder;
  const auto with_checkpoints = [&folder](SmallRun& run) {
    sharded(Sharded::parameters)(run);
    run.session->use(Checkpoints(CheckpointsOptions(folder.path()).every(1)));
  };
  const std::vector<Mistake> mistakes = {
      {"parameters without blocks",
       {"Shards(model->blocks)"},
       made(ShardsOptions().what(Sharded::parameters), false)},
      {"state with blocks", {"leave out the Blocks"}, made(ShardsOptions().what(Sharded::state), true)},
      {"a prefetch without blocks", {"prefetch", "Blocks"}, made(ShardsOptions().prefetch(2), false)},
      {"kept after forward without blocks",
       {"keep_after_forward", "Blocks"},
       made(ShardsOptions().keep_after_forward(true), false)},
      {"reduced once without blocks",
       {"reduce_every_micro_step", "Sharded::state"},
       made(ShardsOptions().reduce_every_micro_step(false), false)},
      {"a negative prefetch", {"prefetch", "-1"}, made(ShardsOptions().prefetch(-1), true)},
      {"units of bytes with blocks", {"unit_bytes"}, made(ShardsOptions().unit_bytes(100), true)},
      {"no blocks", {"without a block"}, [] { Shards{Blocks()}; }},
      {"another model's blocks",
       {"register_module", "Shards"},
       [] {
         SmallModel model = small_model(), other = small_model();
         FusedAdamW optimizer(model->parameters());
         Session(*model, optimizer, Communicator::in_process(1)[0]).use(Shards(other->stack));
       }},
      {"a block that came later", {"no block 3", "before Session::use"}, train([](SmallRun& run) {
         run.model->stack->push_back(torch::nn::Linear(kWidth, kWidth));
         auto [x, y] = run.session->begin(small_batch(0).first, small_batch(0).second);
         run.model->stack->run(
             3, [](const Tensor& h) { return h; }, x);
       })},
      {"a layer frozen later", {"frozen", "new Session"}, train([](SmallRun& run) {
         run.model->blocks[0]->weight.requires_grad_(false);
         run.step();
       })},
      {"other memory", {"was moved"}, train([](SmallRun& run) {
         run.model->blocks[0]->weight.set_data(torch::ones({kWidth, kWidth}));
         run.step();
       })},
      {"moved to and fro while all are there", {"was moved"}, train([](SmallRun& run) {
         {
           const auto whole = run.session->whole_parameters();
           run.model->to(at::kDouble);
           run.model->to(at::kFloat);
         }
         run.step();
       })},
      {"saved while all are there",
       {"end its scope"},
       train(
           [](SmallRun& run) {
             const auto whole = run.session->whole_parameters();
             run.parts->find<Checkpoints>()->save_now();
           },
           [](SmallRun& run) {
             static const TemporaryFolder of_save;
             sharded(Sharded::parameters)(run);
             run.session->use(Checkpoints(CheckpointsOptions(of_save.path()).every(100)));
           })},
      {"moved to another dtype", {"is shared out"}, train([](SmallRun& run) { run.model->to(at::kDouble); })},
      {"a weight read between steps", {"is shared out", "whole_parameters"}, train([](SmallRun& run) {
         (void)run.model->head->weight.sum();
       })},
      {"whole parameters inside a step", {"between steps"}, train([](SmallRun& run) {
         auto [x, y] = run.session->begin(small_batch(0).first, small_batch(0).second);
         const auto whole = run.session->whole_parameters();
       })},
      {"training beside whole parameters", {"end its scope"}, train([](SmallRun& run) {
         const auto whole = run.session->whole_parameters();
         run.step();
       })},
      {"another Session", {"another Session", "keep that Session"}, train([](SmallRun& run) {
         run.session->finish();
         run.session.reset();
         Session next(*run.model, *run.optimizer, run.world);
         next.use(Shards(run.model->stack));
         (void)next.begin(small_batch(0).first);
       })},
      {"resumed after prewarm",
       {"resume", "before prewarm"},
       [=] {
         Runs runs = runs_of(shared_optimizers()[0], {}, 2, with_checkpoints);
         const std::string message = on_all(runs, [](SmallRun& run) {
           run.session->prewarm([&] { return run.model->loss(small_batch(0).first, small_batch(0).second); });
           run.session->resume();
         });
         if (!message.empty()) throw Error(message);
       }},
      {"an optimizer step by hand", {"leave steps to the Session"}, train([](SmallRun& run) {
         run.optimizer->step();
       })},
  };
  CHECK(faults_of(mistakes) == "");
}

}  // namespace pacer::testing
