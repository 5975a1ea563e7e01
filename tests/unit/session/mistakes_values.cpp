// Values that cannot be: options, schedules, lengths, layers, parts on their own. What is said of each.
#include <limits>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/session/mistakes.h"
#include "support/session/small_model.h"

namespace pacer::testing {
namespace {

constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();
using Rate = LearningRateScheduleOptions;

std::vector<Tensor> leaf(at::ScalarType dtype = at::kFloat) {
  return {torch::ones({4}, dtype).requires_grad_()};
}

// The same mistake in the options of each optimizer.
template <class Optimizer, class Options>
void add_option_mistakes(const std::string& name, std::vector<Mistake>& all) {
  using Change = std::function<void(Options&)>;
  const auto add = [&](const std::string& what, const std::vector<std::string>& says, const Change& change) {
    all.push_back({name + ", " + what, says, [change] {
                     Options options;
                     change(options);
                     Optimizer(leaf(), options);
                   }});
  };
  add("a negative rate", {"lr", "-0.1"}, [](Options& o) { o.lr(-0.1); });
  add("a rate that is no number", {"lr", "nan"}, [](Options& o) { o.lr(kNoNumber); });
  if constexpr (std::is_same_v<Options, FusedSgdOptions>) {
    add("a momentum of 1", {"momentum", "[0, 1)"}, [](Options& o) { o.momentum(1); });
    add("a negative dampening", {"dampening", "-0.5"}, [](Options& o) { o.dampening(-0.5); });
    add("Nesterov's momentum without one", {"Nesterov", "above 0"}, [](Options& o) { o.nesterov(true); });
  } else if constexpr (std::is_same_v<Options, FusedRmspropOptions>) {
    add("an alpha of 1", {"alpha", "[0, 1)"}, [](Options& o) { o.alpha(1); });
    add("a negative momentum", {"momentum", "-0.5"}, [](Options& o) { o.momentum(-0.5); });
    add("a negative eps", {"eps"}, [](Options& o) { o.eps(-1e-8); });
  } else {
    add("beta1 of 1", {"first beta", "[0, 1)"}, [](Options& o) { o.betas({1.0, 0.999}); });
    add("a negative beta2", {"second beta", "-0.5"}, [](Options& o) { o.betas({0.9, -0.5}); });
    add("a negative eps", {"eps"}, [](Options& o) { o.eps(-1e-8); });
  }
  add("a negative decay", {"weight_decay", "-1"}, [](Options& o) { o.weight_decay(-1); });
  add("a negative initial rate", {"initial_lr"}, [](Options& o) { o.initial_lr(-1.0); });
  all.push_back({name + ", no parameter is a leaf", {"leaf"}, [] {
                   Optimizer({torch::ones({4}).requires_grad_() * 2}, Options());
                 }});
  all.push_back({name + ", a parameter twice", {"given twice"}, [] {
                   const auto p = leaf();
                   Optimizer({p[0], p[0]}, Options());
                 }});
  all.push_back({name + ", an undefined parameter", {"undefined"}, [] { Optimizer({Tensor()}, Options()); }});
  all.push_back({name + ", whole numbers", {"Long"}, [] {
                   Optimizer optimizer({torch::ones({4}, at::kLong)}, Options());
                   optimizer.step();
                 }});
}

template <class Optimizer, class Options>
void add_onebit_mistakes(const std::string& name, std::vector<Mistake>& all) {
  const auto make = [](const Options& options) { return [options] { Optimizer(leaf(), options); }; };
  all.push_back({name + ", no freeze", {"freeze_step", "freeze_automatically"}, make(Options())});
  all.push_back({name + ", freezes before the first step", {"freeze_step"}, make(Options().freeze_step(0))});
  all.push_back(
      {name + ", a negative floor", {"variance_floor"}, make(Options().freeze_step(5).variance_floor(-1))});
  all.push_back({name + ", both ways to freeze",
                 {"freeze_step", "freeze_automatically"},
                 make(Options().freeze_step(5).freeze_automatically(100))});
  all.push_back({name + ", fp64", {"fp64", "compress(false)"}, [] {
                   const auto p = leaf(at::kDouble);
                   Optimizer optimizer(p,
                                       Options().freeze_step(1).compress_alone(true).compress_vectors(true));
                   for (int i = 0; i < 3; ++i) {
                     p[0].mutable_grad() = torch::ones({4}, at::kDouble);
                     optimizer.step();
                   }
                 }});
}

std::vector<Mistake> optimizer_mistakes() {
  std::vector<Mistake> all;
  add_option_mistakes<FusedAdam, FusedAdamOptions>("FusedAdam", all);
  add_option_mistakes<FusedAdamW, FusedAdamWOptions>("FusedAdamW", all);
  add_option_mistakes<FusedLamb, FusedLambOptions>("FusedLamb", all);
  add_option_mistakes<FusedSgd, FusedSgdOptions>("FusedSgd", all);
  add_option_mistakes<FusedRmsprop, FusedRmspropOptions>("FusedRmsprop", all);
  add_onebit_mistakes<OneBitAdam, OneBitAdamOptions>("OneBitAdam", all);
  add_onebit_mistakes<OneBitLamb, OneBitLambOptions>("OneBitLamb", all);
  all.push_back(
      {"stochastic rounding beside a master copy", {"stochastic", "master"}, [] {
         FusedAdamW(leaf(),
                    FusedAdamWOptions().rounding(Rounding::stochastic).master_weights(MasterWeights::fp32));
       }});
  all.push_back({"trust ratios between 2 and 1", {"min_coeff", "max_coeff"}, [] {
                   FusedLamb(leaf(), FusedLambOptions().min_coeff(2).max_coeff(1));
                 }});
  all.push_back({"a sparse gradient", {"sparse"}, [] {
                   const auto p = leaf();
                   FusedAdamW optimizer(p);
                   p[0].mutable_grad() = torch::ones({4}).to_sparse();
                   optimizer.step();
                 }});
  all.push_back({"complex parameters", {"Complex"}, [] {
                   std::vector<Tensor> p = {torch::ones({4}, at::kComplexFloat).requires_grad_()};
                   FusedAdamW optimizer(p);
                   p[0].mutable_grad() = torch::ones({4}, at::kComplexFloat);
                   optimizer.step();
                 }});
  return all;
}

std::vector<Mistake> schedule_mistakes() {
  return {
      {"a negative warm-up",
       {"warm-up", "-1"},
       [] {
         warmup_cosine({-1, 10});
       }},
      {"a warm-up that is longer than the run",
       {"warm-up takes 20", "total_steps", "10"},
       [] {
         warmup_cosine({20, 10});
       }},
      {"a linear warm-up that is longer than the run",
       {"warm-up takes 11"},
       [] {
         warmup_linear({11, 10});
       }},
      {"a decay without an end", {"total_steps or total_tokens"}, [] { warmup_cosine({10}); }},
      {"two ends", {"total_steps and total_tokens"}, [] { warmup_cosine(Rate(1, 10).total_tokens(10)); }},
      {"a negative end",
       {"total_steps"},
       [] {
         warmup_linear({0, -10});
       }},
      {"an end factor of 2", {"end_factor", "[0, 1]"}, [] { warmup_linear(Rate(1, 10).end_factor(2)); }},
      {"a negative start", {"start_factor"}, [] { warmup_linear(Rate(1, 10).start_factor(-1)); }},
      {"an exponential without gamma", {"gamma"}, [] { warmup_exponential({10}); }},
      {"gamma of 0", {"gamma", "(0, 1]"}, [] { warmup_exponential(Rate(1).gamma(0)); }},
      {"a decay every 0 steps", {"every"}, [] { warmup_exponential(Rate(1).gamma(0.5).every(0)); }},
      {"a power of 0", {"power"}, [] { warmup_polynomial(Rate(1, 10).power(0)); }},
      {"a power that nobody reads", {"no use for power"}, [] { warmup_cosine(Rate(1, 10).power(2)); }},
      {"gamma that nobody reads", {"no use for gamma"}, [] { warmup_cosine(Rate(1, 10).gamma(0.5)); }},
      {"an end that nobody reads",
       {"no use for total_steps"},
       [] {
         constant_schedule({1, 10});
       }},
      {"a cycle without a way up",
       {"needs warm-up steps", "give 1 or more"},
       [] {
         one_cycle({0, 10});
       }},
      {"a cycle that goes up by another way",
       {"no use for warm_up"},
       [] { one_cycle(Rate(1, 10).warm_up(WarmUp::linear)); }},
      {"a part of a chain before the one that it follows",
       {"then: step 5", "step 7"},
       [] { (void)constant_schedule().then(7, constant_schedule()).then(5, constant_schedule()); }},
      {"a part of a chain that follows steps, at a token",
       {"then_at_token", "warmup_cosine", "with then"},
       [] {
         (void)constant_schedule().then_at_token(5, warmup_cosine({1, 10}));
       }},
      {"a step before the first",
       {"step -1"},
       [] {
         Progress progress;
         progress.step = -1;
         (void)constant_schedule().factor(progress);
       }},
      {"a scheduler by tokens without a Session",
       {"LearningRate hook"},
       [] {
         FusedAdamW optimizer(leaf());
         FactorLR(optimizer, warmup_cosine(Rate(1).total_tokens(10)));
       }},
      {"two schedules",
       {"already does"},
       [] {
         FusedAdamW optimizer(leaf());
         const FactorLR first(optimizer, constant_schedule());
         const FactorLR second(optimizer, constant_schedule());
       }},
      {"lengths that shrink", {"first", "last"}, [] { LengthSchedule(16, 4); }},
      {"a length of 0", {"first"}, [] { LengthSchedule(0, 4); }},
      {"a negative ramp", {"ramp_steps"}, [] { LengthSchedule(4, 16).ramp_steps(-1); }},
      {"two ramps", {"ramp_"}, [] { LengthSchedule(4, 16).ramp_steps(5).ramp_tokens(5); }},
      {"a root of 0", {"root"}, [] { LengthSchedule(4, 16).root(0); }},
      {"a difficulty step of 0", {"difficulty_step"}, [] { LengthSchedule(4, 16).difficulty_step(0); }},
      {"a table that does not end at the last length",
       {"table"},
       [] {
         LengthSchedule(4, 16).table({{1, 8}});
       }},
      {"a table that shrinks",
       {"table"},
       [] {
         LengthSchedule(4, 16).table({{1, 8}, {2, 6}, {3, 16}});
       }},
      {"a curriculum without a way",
       {"no way from 4 to 16"},
       [] { SequenceLength(SequenceLengthOptions(4, 16)); }},
      {"layers kept to 0 %", {"theta_bar"}, [] { LayerDrop(LayerDropOptions().theta_bar(0)); }},
      {"layers kept to 150 %", {"theta_bar", "1.5"}, [] { LayerDrop(LayerDropOptions().theta_bar(1.5)); }},
      {"a negative gamma", {"gamma"}, [] { LayerDrop(LayerDropOptions().gamma(-1)); }},
      {"a layer beyond the stack",
       {"2 layers and no layer 2"},
       [] {
         LayerDrop gates;
         gates->add();
         gates->add();
         (void)gates->keeps(2);
       }},
      {"a gate around a block that changes the shape",
       {"keep the shape"},
       [] {
         LayerDrop gates;
         gates->add();
         gates->gate(0, torch::ones({2}), [](const Tensor&) { return torch::ones({3}); });
       }},
      {"clipping to 0 would be no training, to -1", {"GradientClipping", "-1"}, [] { GradientClipping{-1}; }},
      {"clipping to what is no number", {"GradientClipping"}, [] { GradientClipping{kNoNumber}; }},
      {"windows of no micro-step", {"GradientAccumulation", "0"}, [] { GradientAccumulation(0); }},
      {"checkpoints without a folder", {"folder"}, [] { Checkpoints(CheckpointsOptions("")); }},
      {"checkpoints every 0 steps", {"every", "0"}, [] { Checkpoints(CheckpointsOptions("x").every(0)); }},
      {"no checkpoint is kept", {"keep", "0"}, [] { Checkpoints(CheckpointsOptions("x").keep(0)); }},
      {"checkpoints loaded without a Session",
       {"load_newest", "session.use"},
       [] { Checkpoints(CheckpointsOptions("x")).load_newest(); }},
      {"metrics without a folder", {"folder"}, [] { Metrics(""); }},
      {"metrics every 0 steps", {"every"}, [] { Metrics(MetricsOptions("x").every(0)); }},
      {"metrics of a run of -5 steps", {"total_steps"}, [] { Metrics(MetricsOptions("x").total_steps(-5)); }},
      {"a data set without examples", {"at least one example"}, [] { EpochSampler(0); }},
      {"a sampler for another data set", {"another data set"}, [] { EpochSampler(4).reset(5); }},
      {"a sampler beyond its end", {"after 5"}, [] { EpochSampler(4).resume_at(0, 5); }},
      {"more examples than were handed out",
       {"handed out", "count_examples"},
       [] {
         EpochSampler sampler(8);
         sampler.reset();
         (void)sampler.next(2);
         sampler.count(5);
       }},
  };
}

std::vector<Mistake> collective_mistakes() {
  const auto world = [] { return Communicator::alone(at::kCPU); };
  const auto two = [](CommunicatorOptions options) { Communicator::in_process(2, options); };
  return {
      {"a deadline of 0", {"timeout"}, [=] { two(CommunicatorOptions().timeout(std::chrono::seconds(0))); }},
      {"nodes of -1 ranks", {"ranks_per_node"}, [=] { two(CommunicatorOptions().ranks_per_node(-1)); }},
      {"nodes of no rank", {"ranks_per_node"}, [=] { two(CommunicatorOptions().ranks_per_node(0)); }},
      {"an address without a name",
       {"listen_address"},
       [=] { two(CommunicatorOptions().listen_address("")); }},
      {"2 ranks as nodes of 3", {"nodes of 3"}, [=] { two(CommunicatorOptions().ranks_per_node(3)); }},
      {"a meeting file without a name", {"path"}, [] { Communicator::from_file("", 0, 1); }},
      {"no host", {"host"}, [] { Communicator::from_address("", 1, 0, 1); }},
      {"port 0", {"port"}, [] { Communicator::from_address("localhost", 0, 0, 1); }},
      {"port 65536", {"port", "65536"}, [] { Communicator::from_address("localhost", 65536, 0, 1); }},
      {"rank 2 of 2", {"rank 2"}, [] { Communicator::from_address("localhost", 1234, 2, 2); }},
      {"a world of 0", {"at least 1 rank"}, [] { Communicator::from_address("localhost", 1234, 0, 0); }},
      {"a tensor that is not contiguous",
       {"contiguous"},
       [=] {
         world()->all_reduce(torch::ones({3, 4}).t()).wait();
       }},
      {"an undefined tensor", {"undefined"}, [=] { world()->all_reduce(Tensor()).wait(); }},
      {"a gather into too little",
       {"all_gather"},
       [=] { world()->all_gather(torch::ones({3}), torch::ones({4})).wait(); }},
      {"a broadcast from nobody", {"rank 3"}, [=] { world()->broadcast(torch::ones({3}), 3).wait(); }},
      {"a message to oneself", {"no peer 0"}, [=] { world()->send(torch::ones({3}), 0).wait(); }},
      {"counts that do not add up",
       {"counts"},
       [=] { world()->all_to_all(torch::ones({3}), {2}, torch::ones({3}), {3}).wait(); }},
      {"a compressed mean of another size",
       {"elements"},
       [=] {
         CompressedAllReduce(world(), 8, CompressionOptions().compress_alone(true)).reduce(torch::ones({9}));
       }},
      {"a compressed mean of fp64",
       {"fp32"},
       [=] {
         CompressedAllReduce(world(), 8, CompressionOptions().compress_alone(true))
             .reduce(torch::ones({8}, at::kDouble));
       }},
      {"chunks of 100 elements",
       {"multiple of 128"},
       [=] { CompressedAllReduce(world(), 8, CompressionOptions().alignment(100)); }},
      {"no Communicator for a compressed mean", {"Communicator"}, [] { CompressedAllReduce(nullptr, 8); }},
      {"a negative size", {"-1"}, [=] { CompressedAllReduce(world(), -1); }},
  };
}

}  // namespace

TEST_CASE("values that cannot be are refused in a sentence: optimizers", "[mistakes]") {
  const auto mistakes = optimizer_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 69);
}

TEST_CASE("values that cannot be are refused in a sentence: schedules and hooks", "[mistakes]") {
  const auto mistakes = schedule_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 50);
}

TEST_CASE("values that cannot be are refused in a sentence: collectives", "[mistakes]") {
  const auto mistakes = collective_mistakes();
  CHECK(faults_of(mistakes) == "");
  CHECK(mistakes.size() == 22);
}

}  // namespace pacer::testing
