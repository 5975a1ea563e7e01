// Mistakes in a training loop: what a Session and its hooks say of them. Most of these train wrong, or lose
// work, where nobody says anything. Also what is no mistake, and passes without a word.
#include <limits>

#include "support/catch.h"
#include "support/session/mistakes_trainer.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

std::vector<Mistake> loop_mistakes() {
  return {
      with_trainer("zero_grad before each backward of a window", {"delete zero_grad()", "first 1 of 4"},
                   [](Trainer& t) {
                     t.session.use(GradientAccumulation(4));
                     for (int i = 0; i < 4; ++i) {
                       const Tensor loss = t.forward();
                       t.optimizer.zero_grad();
                       t.session.backward(loss);
                       t.session.step();
                     }
                   }),
      with_trainer("zero_grad after each step() of a window", {"delete zero_grad()"},
                   [](Trainer& t) {
                     t.session.use(GradientAccumulation(2));
                     for (int i = 0; i < 4; ++i) {
                       t.micro_step();
                       t.optimizer.zero_grad();
                     }
                   }),
      with_trainer("the model's zero_grad in a window", {"delete zero_grad()"},
                   [](Trainer& t) {
                     t.session.use(GradientAccumulation(2));
                     t.micro_step();
                     t.model->zero_grad();
                     t.micro_step();
                   }),
      with_trainer("zero_grad that writes zeros", {"delete zero_grad()"},
                   [](Trainer& t) {
                     t.session.use(GradientAccumulation(2));
                     t.micro_step();
                     t.optimizer.zero_grad(/*set_to_none=*/false);
                     t.micro_step();
                   }),
      with_trainer("zero_grad between backward and step", {"delete zero_grad()"},
                   [](Trainer& t) {
                     t.session.backward(t.forward());
                     t.optimizer.zero_grad();
                     t.session.step();
                   }),
      with_trainer("step without backward", {"Session::step without backward"},
                   [](Trainer& t) { t.session.step(); }),
      with_trainer("step after begin", {"Session::step without backward"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.step();
                   }),
      with_trainer("step twice", {"Session::step without backward"},
                   [](Trainer& t) {
                     t.micro_step();
                     t.session.step();
                   }),
      with_trainer("backward without begin", {"Session::backward without begin"},
                   [](Trainer& t) { t.session.backward(t.model->forward(t.inputs).mean()); }),
      with_trainer("backward twice", {"Session::backward without begin"},
                   [](Trainer& t) {
                     t.session.backward(t.forward());
                     t.session.backward(t.model->forward(t.inputs).mean());
                   }),
      with_trainer("begin after backward", {"Session::begin after backward without step"},
                   [](Trainer& t) {
                     t.session.backward(t.forward());
                     (void)t.forward();
                   }),
      with_trainer("a loss of several numbers", {"one floating-point number", "mean"},
                   [](Trainer& t) {
                     auto [x] = t.session.begin(t.inputs);
                     t.session.backward(t.model->forward(x));
                   }),
      with_trainer("a loss that is detached", {"depends on no parameter"},
                   [](Trainer& t) { t.session.backward(t.forward().detach()); }),
      with_trainer("an undefined loss", {"needs a loss"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.backward(Tensor());
                   }),
      with_trainer("a loss of whole numbers", {"floating-point"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.backward(torch::ones({}, at::kLong));
                   }),
      with_trainer("a batch with a hole", {"tensor 0", "undefined"},
                   [](Trainer& t) { (void)t.session.begin(Tensor()); }),
      with_trainer("begin after finish", {"after finish"},
                   [](Trainer& t) {
                     t.session.finish();
                     (void)t.forward();
                   }),
      with_trainer("finish inside a step", {"finish after backward without step"},
                   [](Trainer& t) {
                     t.session.backward(t.forward());
                     t.session.finish();
                   }),
      with_trainer("tokens counted at the wrong place", {"count_tokens belongs between"},
                   [](Trainer& t) { t.session.count_tokens(3); }),
      with_trainer("a negative number of tokens", {"count_tokens", "-3"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.count_tokens(-3);
                   }),
      with_trainer("examples counted at the wrong place", {"count_examples belongs between"},
                   [](Trainer& t) { t.session.count_examples(3); }),
      with_trainer("a negative number of examples", {"count_examples", "-3"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.count_examples(-3);
                   }),
      with_trainer("a window of padding only", {"trains on no token", "changes nothing"},
                   [](Trainer& t) {
                     t.session.use(
                         GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(true)));
                     for (int i = 0; i < 2; ++i) {
                       const Tensor loss = t.forward();
                       t.session.count_tokens(0);
                       t.session.backward(loss);
                       t.session.step();
                     }
                   }),
      with_trainer("evaluation inside forward", {"evaluate belongs between steps"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.evaluate([] {});
                   }),
      with_trainer("prewarm after begin", {"prewarm belongs between steps"},
                   [](Trainer& t) {
                     (void)t.forward();
                     t.session.prewarm([&] { return t.model->forward(t.inputs).mean(); });
                   }),
      with_trainer("prewarm without a loss", {"returns a loss"},
                   [](Trainer& t) { t.session.prewarm([] { return Tensor(); }); }),
      with_trainer("the norm that nobody looks at", {"add GradientClipping"},
                   [](Trainer& t) { (void)t.session.gradient_norm(); }),
      with_trainer("resume without checkpoints", {"needs a Checkpoints hook"},
                   [](Trainer& t) { t.session.resume(); }),
      with_trainer("thirty steps without finite gradients",
                   {"last 30 steps changed nothing", "learning rate"},
                   [](Trainer& t) {
                     t.session.use(GradientClipping(1.0));
                     t.inputs.fill_(std::numeric_limits<float>::infinity());
                     t.steps(60);
                   }),
      {"an incomplete window without finish",
       {"1 of 4 micro-steps", "finish()"},
       [] {
         Trainer t;
         t.session.use(GradientAccumulation(4));
         t.micro_step();
       }},
      {"checkpoints without finish",
       {"without finish()", "checkpoint"},
       [] {
         const TemporaryFolder folder;
         Trainer t;
         t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
         t.steps(2);
       }},
      {"metrics without finish",
       {"without finish()", "metrics"},
       [] {
         const TemporaryFolder folder;
         Trainer t;
         t.session.use(Metrics(MetricsOptions(folder.path("m")).progress(false)));
         t.steps(2);
       }},
  };
}

}  // namespace

TEST_CASE("mistakes in a loop are told in a sentence", "[mistakes]") {
  const auto mistakes = loop_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 32);
}

TEST_CASE("what is meant passes without a word", "[mistakes]") {
  const auto heard = [](const std::function<void(Trainer&)>& use) {
    return heard_of([&] {
      Trainer trainer;
      use(trainer);
      trainer.session.finish();
    });
  };
  CHECK(heard([](Trainer& t) { t.steps(5); }) == "");
  CHECK(heard([](Trainer& t) {
          const TemporaryFolder folder;
          t.session.use(Checkpoints(folder.path("c").c_str())).use(LearningRate(constant_schedule()));
          t.steps(5);
          t.session.finish();
        }) == "");
  CHECK(heard([](Trainer& t) {  // gradients that are edited inside a window
          t.session.use(GradientAccumulation(2));
          for (int i = 0; i < 4; ++i) {
            t.micro_step();
            for (const Tensor& p : t.model->parameters()) {
              if (p.grad().defined()) p.mutable_grad().mul_(0.5);
            }
          }
        }) == "");
  CHECK(heard([](Trainer& t) {  // zero_grad between whole steps
          for (int i = 0; i < 3; ++i) {
            t.optimizer.zero_grad();
            t.micro_step();
          }
        }) == "");
  CHECK(heard([](Trainer& t) {  // steps that are skipped now and then
          t.session.use(GradientClipping(1.0));
          for (int i = 0; i < 60; ++i) {
            t.inputs.fill_(i % 20 == 0 ? 1.0F : std::numeric_limits<float>::infinity());
            t.micro_step();
          }
        }) == "");
  CHECK(heard([](Trainer& t) {
          EpochSampler sampler(16);
          t.session.use(sampler);
          for (int epoch = 0; epoch < 2; ++epoch) {
            sampler.reset();
            while (sampler.next(8)) {
              t.inputs = torch::ones({1, 3});
              const Tensor loss = t.forward();
              t.session.count_examples(8);
              t.session.backward(loss);
              t.session.step();
            }
          }
        }) == "");
  CHECK(heard([](Trainer& t) {
          t.model->bias.requires_grad_(false);
          t.steps(2);
        }) == "");
}

TEST_CASE("a window without tokens changes nothing, and the next one trains", "[mistakes]") {
  Trainer t;
  t.session.use(GradientAccumulation(GradientAccumulationOptions(1).weight_by_tokens(true)));
  const Tensor before = t.model->weight.detach().clone();
  const auto step_of = [&](int64_t tokens) {
    const Tensor loss = t.forward();
    t.session.count_tokens(tokens);
    t.session.backward(loss);
    t.session.step();
  };
  step_of(0);
  CHECK(same_bits(t.model->weight, before));
  CHECK(t.session.progress().step == 1);
  step_of(5);
  CHECK(!same_bits(t.model->weight, before));
  CHECK(t.model->weight.isfinite().all().item<bool>());
}

TEST_CASE("the weight of a micro-batch multiplies a 16-bit loss in fp32", "[mistakes]") {
  Trainer t;
  t.session.use(GradientAccumulation(GradientAccumulationOptions(2).weight_by_tokens(true)));
  SessionParts* parts = nullptr;
  t.session.use(PartsProbe(parts));
  parts->record_loss = true;
  const Tensor loss = t.forward().to(at::kBFloat16);
  t.session.count_tokens(4097);
  t.session.backward(loss);
  CHECK(parts->window.loss.item<float>() == loss.item<float>() * (4097.0F / 4096));
  t.session.step();
  t.micro_step();
  t.session.finish();
}

}  // namespace pacer::testing
