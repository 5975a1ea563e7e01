// Mistakes in a training loop: what a Session and its hooks say of them. Most of these train wrong, or lose
// work, where nobody says anything.
#include <functional>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/mistakes.h"
#include "support/optimizers.h"
#include "support/registry.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

// A model of one layer, its optimizer, and a loop in parts.
struct Trainer {
  explicit Trainer(double rate = 0.1)
      : optimizer(model->parameters(), FusedAdamWOptions(rate)), session(model, optimizer) {}

  Tensor forward() {
    auto [x] = session.begin(inputs);
    return model->forward(x).square().mean();
  }
  void micro_step() {
    session.backward(forward());
    session.step();
  }
  void steps(int count) {
    for (int i = 0; i < count; ++i) micro_step();
  }

  torch::nn::Linear model{3, 2};
  FusedAdamW optimizer;
  Session session;
  Tensor inputs = torch::ones({4, 3});
};

Mistake with_trainer(std::string name, std::vector<std::string> says, std::function<void(Trainer&)> make) {
  return {std::move(name), std::move(says), [make = std::move(make)] {
            Trainer trainer;
            make(trainer);
            trainer.session.finish();
          }};
}

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
                     t.session.use(GradientAccumulation(2).weight_by_tokens(true));
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

std::vector<Mistake> set_up_mistakes() {
  return {
      {"an optimizer of another model",
       {"none of the optimizer's 2 parameters", "this model's parameters()"},
       [] {
         torch::nn::Linear model(3, 2), other(3, 2);
         FusedAdamW optimizer(other->parameters());
         Session session(model, optimizer);
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"an optimizer made before the model was cloned",
       {"none of the optimizer's"},
       [] {
         torch::nn::Linear model(3, 2);
         FusedAdamW optimizer(model->parameters());
         const auto copy = model->clone();
         Session session(*copy, optimizer);
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"an optimizer of half a model",
       {"1 parameters of the model need a gradient", "bias"},
       [] {
         torch::nn::Linear model(3, 2);
         FusedAdamW optimizer(std::vector<Tensor>{model->weight});
         Session session(model, optimizer);
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"an optimizer of two models",
       {"2 parameters that are not the model's"},
       [] {
         torch::nn::Linear model(3, 2), other(3, 2);
         auto parameters = model->parameters();
         for (const Tensor& p : other->parameters()) parameters.push_back(p);
         FusedAdamW optimizer(parameters);
         Session session(model, optimizer);
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"an optimizer without parameters",
       {"at least one parameter"},
       [] {
         torch::nn::Linear model(3, 2);
         FusedAdamW optimizer(std::vector<Tensor>{});
         Session(model, optimizer);
       }},
      with_trainer("a hook twice", {"already has the hook gradient_clipping"},
                   [](Trainer& t) { t.session.use(GradientClipping(1)).use(GradientClipping(2)); }),
      with_trainer("a hook after begin", {"after begin or resume"},
                   [](Trainer& t) {
                     t.micro_step();
                     t.session.use(GradientClipping(1));
                   }),
      with_trainer("no hook at all", {"null hook"},
                   [](Trainer& t) { t.session.use(std::shared_ptr<Hook>()); }),
      with_trainer("an empty LayerDrop", {"empty LayerDrop"},
                   [](Trainer& t) { t.session.use(LayerDrop(nullptr)); }),
      with_trainer("a LayerDrop that the model does not know", {"no part of the model", "register_module"},
                   [](Trainer& t) {
                     LayerDrop gates;
                     gates->add(*t.model);
                     t.session.use(gates);
                   }),
      with_trainer("a LayerDrop without layers", {"no layers", "add(*block)"},
                   [](Trainer& t) {
                     const LayerDrop gates;
                     t.model->register_module("gates", gates);
                     t.session.use(gates);
                   }),
      with_trainer("a LayerDrop that the Session does not know", {"session.use(layer_drop)"},
                   [](Trainer& t) {
                     LayerDrop gates;
                     gates->add(*t.model);
                     t.model->register_module("gates", gates);
                     t.micro_step();
                   }),
      with_trainer("a LayerDrop without any gate", {"no layer asked", "gate(i, x, block)"},
                   [](Trainer& t) {
                     LayerDrop gates;
                     gates->add();
                     t.model->register_module("gates", gates);
                     t.session.use(gates);
                     t.micro_step();
                   }),
      with_trainer("a rate set by hand beside a schedule", {"was changed from", "LearningRate hook sets it"},
                   [](Trainer& t) {
                     t.session.use(LearningRate(constant_schedule()));
                     t.micro_step();
                     t.optimizer.param_groups()[0].options().set_lr(0.5);
                     t.micro_step();
                   }),
      with_trainer("a hook and a scheduler", {"already does"},
                   [](Trainer& t) {
                     t.session.use(LearningRate(constant_schedule()));
                     FactorLR(t.optimizer, constant_schedule());
                   }),
      with_trainer("a schedule that ends before the run", {"ended after 3 steps", "rate of 0"},
                   [](Trainer& t) {
                     t.session.use(LearningRate(warmup_linear({0, 3})));
                     t.steps(5);
                   }),
      with_trainer("a curriculum on batches of time first", {"cuts dimension 1", "[16, 8]", "to 4"},
                   [](Trainer& t) {
                     t.session.use(SequenceLength(SequenceLengthOptions(4, 8).ramp_steps(9)));
                     auto [x] = t.session.begin(torch::ones({16, 8}));
                   }),
      with_trainer("a curriculum that is longer than the batch", {"wants sequences of 32", "allow_shorter"},
                   [](Trainer& t) {
                     t.session.use(SequenceLength(SequenceLengthOptions(32, 64).ramp_steps(9)));
                     auto [x] = t.session.begin(torch::ones({4, 16}));
                   }),
      with_trainer("a curriculum without sequences", {"finds no sequence"},
                   [](Trainer& t) {
                     t.session.use(SequenceLength(SequenceLengthOptions(1, 4).ramp_steps(9)));
                     auto [x] = t.session.begin(torch::ones({4}));
                   }),
      with_trainer("a reshaped mask", {"cannot reshape tensor 1"},
                   [](Trainer& t) {
                     t.session.use(SequenceLength(
                         SequenceLengthOptions(8, 16).ramp_steps(9).mode(LengthMode::reshape)));
                     auto [x, y] = t.session.begin(torch::ones({4, 16}), torch::ones({4, 1, 16, 16}));
                   }),
      with_trainer("sequence-first batches and a sampler", {"handed out", "count_examples"},
                   [](Trainer& t) {
                     EpochSampler sampler(64);
                     t.session.use(sampler);
                     sampler.reset();
                     (void)sampler.next(2);
                     t.inputs = torch::ones({16, 2, 3});
                     t.micro_step();
                   }),
      with_trainer("packed batches and a sampler", {"of which only 2 were counted", "count_examples"},
                   [](Trainer& t) {
                     EpochSampler sampler(16);
                     t.session.use(sampler);
                     t.inputs = torch::ones({1, 3});
                     sampler.reset();
                     while (sampler.next(8)) t.micro_step();
                     sampler.reset();
                   }),
      with_trainer("a sampler of another rank", {"rank 1 of 2"},
                   [](Trainer& t) {
                     const auto worlds = Communicator::in_process(2);
                     t.session.use(EpochSampler(8, 0, *worlds[1]));
                   }),
      with_trainer("DataParallel without peers", {"give the Session a Communicator"},
                   [](Trainer& t) { t.session.use(DataParallel()); }),
      {"fp16 on parameters that are fp16",
       {"Half"},
       [] {
         torch::nn::Linear model(3, 2);
         model->to(at::kHalf);
         FusedAdamW optimizer(model->parameters());
         Session(model, optimizer).use(Precision::fp16());
       }},
      {"a freeze inside the warm-up",
       {"freeze_step(4)", "learning_rate"},
       [] {
         torch::nn::Linear model(3, 2);
         OneBitAdam optimizer(model->parameters(), OneBitAdamOptions().freeze_step(4).compress_alone(true));
         Session session(model, optimizer);
         session.use(LearningRate(warmup_linear({4, 20})));
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"a freeze with the last short batch",
       {"freeze_step(4)", "sequence_length"},
       [] {
         torch::nn::Linear model(3, 2);
         OneBitAdam optimizer(model->parameters(), OneBitAdamOptions().freeze_step(4).compress_alone(true));
         Session session(model, optimizer);
         session.use(SequenceLength(SequenceLengthOptions(8, 16).ramp_steps(4)));
         (void)session.begin(torch::ones({4, 16}));
       }},
      {"a freeze after the end",
       {"freeze_step(50)", "step 20", "freeze earlier"},
       [] {
         torch::nn::Linear model(3, 2);
         OneBitAdam optimizer(model->parameters(), OneBitAdamOptions().freeze_step(50).compress_alone(true));
         Session session(model, optimizer);
         session.use(LearningRate(warmup_linear({4, 20})));
         (void)session.begin(torch::ones({4, 3}));
       }},
      {"checkpoints of an optimizer whose state has no names",
       {"by parameter name", "torch's"},
       [] {
         struct Own : torch::optim::Optimizer {
           using Optimizer::Optimizer;
           Tensor step(LossClosure = nullptr) override { return {}; }
         };
         torch::nn::Linear model(3, 2);
         Own optimizer({torch::optim::OptimizerParamGroup(model->parameters())},
                       std::make_unique<torch::optim::SGDOptions>(0.1));
         Session(model, optimizer).use(Checkpoints(CheckpointsOptions("unused")));
       }},
  };
}

// Saves two steps of a run into `folder`, then sets up another one there.
Mistake at_resume(std::string name, std::vector<std::string> says,
                  std::function<void(const std::string&)> resume) {
  return {std::move(name), std::move(says), [resume = std::move(resume)] {
            const TemporaryFolder folder;
            {
              Trainer t(0.01);
              t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
              t.steps(2);
              t.session.finish();
            }
            resume(folder.path("c"));
          }};
}

std::vector<Mistake> resume_mistakes() {
  const auto checkpoints = [](const std::string& folder) { return Checkpoints(CheckpointsOptions(folder)); };
  return {
      at_resume("another learning rate",
                {"learning rate 0.01 of the checkpoint", "program says 0.5", "ResumedRates"},
                [=](const std::string& folder) {
                  Trainer t(0.5);
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                }),
      at_resume("another model", {"bias", "build the model that was saved"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(torch::nn::LinearOptions(3, 2).bias(false));
                  FusedAdamW optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("a model of another width", {"shape [2, 3]", "shape [2, 4]"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(4, 2);
                  FusedAdamW optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("another optimizer", {"group/0/min_coeff", "another optimizer than pacer::FusedLamb"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(3, 2);
                  FusedLamb optimizer(model->parameters());
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("one of torch's optimizers", {"group/0/momentum", "another optimizer than torch::optim::SGD"},
                [=](const std::string& folder) {
                  torch::nn::Linear model(3, 2);
                  torch::optim::SGD optimizer(model->parameters(), 0.1);
                  Session session(model, optimizer);
                  session.use(checkpoints(folder)).resume();
                }),
      at_resume("a hook more", {"hook/learning_rate", "hooks that were in use"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder)).use(LearningRate(constant_schedule()));
                  t.session.resume();
                }),
      at_resume("resume after the first step", {"resume belongs before the first begin"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                  t.micro_step();
                  t.session.resume();
                }),
      at_resume("a run that does not resume",
                {"has checkpoints of another run", "session.resume()", "another folder"},
                [=](const std::string& folder) {
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.micro_step();
                }),
      at_resume("a checkpoint that is damaged", {"none of the 1 checkpoints", "can be read"},
                [=](const std::string& folder) {
                  put_content(folder + "/step-0000000002/model.safetensors", "damaged");
                  Trainer t;
                  t.session.use(checkpoints(folder));
                  t.session.resume();
                }),
  };
}

}  // namespace

TEST_CASE("mistakes in a loop are told in a sentence", "[mistakes]") {
  const auto mistakes = loop_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 32);
}

TEST_CASE("mistakes in what a Session is made of are told in a sentence", "[mistakes]") {
  const auto mistakes = set_up_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 29);
}

TEST_CASE("mistakes at resume are told in a sentence", "[mistakes]") {
  const auto mistakes = resume_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 9);
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

TEST_CASE("a resumed run takes the rates that it is told to take", "[mistakes][resume]") {
  for (const bool scheduled : {false, true}) {
    for (const auto rates : {ResumedRates::checkpoint, ResumedRates::program}) {
      const TemporaryFolder folder;
      const auto use = [&](Trainer& t) {
        t.session.use(Checkpoints(CheckpointsOptions(folder.path("c"))));
        if (scheduled) t.session.use(LearningRate(constant_schedule()));
      };
      {
        Trainer t(0.01);
        use(t);
        t.steps(2);
        t.session.finish();
      }
      Trainer t(0.5);
      use(t);
      const std::string heard =
          heard_of([&] { CHECK(t.session.resume(ResumeOptions().learning_rates(rates)) == 2); });
      const double wanted = rates == ResumedRates::program ? 0.5 : 0.01;
      CHECK(contains(heard, "the program says 0.5") == (rates == ResumedRates::checkpoint));
      t.steps(2);
      CHECK(t.optimizer.param_groups()[0].options().get_lr() == wanted);
      t.session.finish();
    }
  }
}

TEST_CASE("a window without tokens changes nothing, and the next one trains", "[mistakes]") {
  Trainer t;
  t.session.use(GradientAccumulation(1).weight_by_tokens(true));
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
  t.session.use(GradientAccumulation(2).weight_by_tokens(true));
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
