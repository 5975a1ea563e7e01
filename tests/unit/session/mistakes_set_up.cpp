// Mistakes in what a Session is made of: model, optimizer, hooks and their options.
#include <torch/optim/sgd.h>

#include <pacer/collectives/detail/in_process_transport.h>

#include "support/catch.h"
#include "support/session/mistakes_trainer.h"

namespace pacer::testing {
namespace {

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
      {"no Communicator where this process has one",
       {"joins several ranks", "was given none", "Session(model, optimizer, world)"},
       [] {
         detail::Connection connection = detail::connect_in_process(1)[0];
         connection.joins_processes = true;  // as one from a launcher's environment does
         const Communicator joined(std::move(connection), CommunicatorOptions());
         torch::nn::Linear model(3, 2);
         FusedAdamW optimizer(model->parameters());
         Session session(model, optimizer);
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

}  // namespace

TEST_CASE("mistakes in what a Session is made of are told in a sentence", "[mistakes]") {
  const auto mistakes = set_up_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 30);
}

}  // namespace pacer::testing
