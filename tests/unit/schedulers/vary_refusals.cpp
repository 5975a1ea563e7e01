// What Vary refuses: numbers that the optimizer does not have or that must stay as they are, values that cannot be,
// two hooks for one number, and changes by somebody else; and when it lets a variance freeze.
#include <cmath>
#include <limits>

#include <torch/optim/lbfgs.h>

#include <pacer/schedulers/vary.h>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/message_of.h"
#include "support/session/registry.h"

namespace pacer::testing {
namespace {

VaryOptions varied(const std::string& name, double at_one, double at_zero,
                   const std::vector<int64_t>& groups = {}) {
  return VaryOptions(name).at_one(at_one).at_zero(at_zero).groups(groups);
}

// What a Session of the registered optimizer says to a Vary with this schedule and these options.
std::string vary_refused(const torch::optim::Optimizer& optimizer, SmallModel& model,
                         const VaryOptions& options) {
  Session session(*model, const_cast<torch::optim::Optimizer&>(optimizer));
  return message_of<InvalidArgument>([&] { session.use(Vary(options, warmup_cosine({0, 10}))); });
}
std::string vary_refused(const std::string& registered, const VaryOptions& options) {
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    if (entry.name != registered) continue;
    SmallModel model = small_model();
    return vary_refused(*entry.make(model->named_parameters(), Communicator::alone(at::kCPU)), model,
                        options);
  }
  return "not registered";
}

// All of the message.
void check_vary_refused(const std::string& registered, const VaryOptions& options, const std::string& says) {
  CAPTURE(registered, options.name());
  CHECK(vary_refused(registered, options) == says);
}

template <class Optimizer, class Options>
std::string vary_refused_of_layer(const Options& options, const VaryOptions& number) {
  SmallModel model = small_model();
  const Optimizer optimizer(model->parameters(), options);
  return vary_refused(optimizer, model, number);
}

}  // namespace

TEST_CASE("a name that an optimizer has not is refused with those that it has", "[session][vary]") {
  const auto check = [](const char* optimizer, const char* type, const char* name, const std::string& names) {
    check_vary_refused(optimizer, varied(name, 0.5, 0.25),
                       std::string("Vary(\"") + name + "\"): " + type +
                           " reads no number of this name; those that may move are " + names);
  };
  const std::string of_adam = "beta1, beta2, eps, weight_decay";
  check("FusedAdam", "pacer::FusedAdam", "momentum", of_adam);
  check("FusedAdamW", "pacer::FusedAdamW", "decay", of_adam);
  check("FusedLamb", "pacer::FusedLamb", "beta3", "beta1, beta2, eps, max_coeff, min_coeff, weight_decay");
  check("FusedSgd", "pacer::FusedSgd", "beta1", "dampening, momentum, weight_decay");
  check("FusedRmsprop", "pacer::FusedRmsprop", "beta2", "alpha, eps, momentum, weight_decay");
  check("Muon", "pacer::Muon", "dampening", "beta1, beta2, eps, momentum, weight_decay");
  check("ScheduleFreeAdamW", "pacer::ScheduleFreeAdamW", "momentum", "beta2, eps, weight_decay");
  check("OneBitMuon", "pacer::OneBitMuon", "alpha", "beta1, beta2, eps, momentum, weight_decay");
  check("OneBitAdam", "pacer::OneBitAdam", "momentum", of_adam);
  check("OneBitLamb", "pacer::OneBitLamb", "scale",
        "beta1, beta2, eps, factor_max, factor_min, factor_threshold, max_coeff, min_coeff, weight_decay");
  check("Adam", "torch::optim::Adam", "amsgrad", of_adam);
  check("AdamW", "torch::optim::AdamW", "momentum", of_adam);
  check("SGD", "torch::optim::SGD", "beta1", "dampening, momentum, weight_decay");
  check("RMSprop", "torch::optim::RMSprop", "beta1", "alpha, eps, momentum, weight_decay");
  check("Adagrad", "torch::optim::Adagrad", "momentum", "eps, weight_decay");
  CHECK(vary_refused_of_layer<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1), varied("lr", 1, 0)) ==
        "Vary(\"lr\"): pacer does not know the options of torch::optim::LBFGS; give a function that sets the "
        "number");
}

TEST_CASE("a number that must not move is refused with the reason", "[session][vary]") {
  const auto check = [](const char* optimizer, const VaryOptions& number, const std::string& says) {
    CAPTURE(optimizer, number.name());
    const std::string message = vary_refused(optimizer, number);
    CHECK(contains(message, "it must not move, because " + says + "; leave the hook out, or give it"));
  };
  for (const RegisteredOptimizer& entry : all_optimizers()) {
    check(entry.name.c_str(), varied("lr", 0.1, 0),
          "it is the learning rate, which the LearningRate hook sets");
  }
  const std::string frozen =
      "the variance of a compressed group freezes in the middle of a run, and what is computed from it "
      "supposes one "
      "beta2 for all of it";
  check("OneBitAdam", varied("beta2", 0.9, 0.99), frozen);
  check("OneBitLamb", varied("beta2", 0.9, 0.99, {1, 0}), frozen);
  for (const char* optimizer : {"OneBitAdam", "OneBitLamb"}) {
    check(optimizer, varied("variance_floor", 0.1, 0, {1}),
          "floors are set when the variance freezes, and it is the same from the first step on");
  }
  check("OneBitLamb", varied("max_coeff", 5, 1),
        "the mean of the trust ratios that they bound is frozen with the variance");
  check("OneBitLamb", varied("coeff_beta", 0.5, 0.1),
        "the mean of the trust ratios is corrected as if it had been the same in all steps");
  check("ScheduleFreeAdamW", varied("beta1", 0.8, 0.9),
        "the average of the weights follows from it and the weights of training, and would jump");
  for (const char* power : {"r", "weight_lr_power"}) {
    check("ScheduleFreeAdamW", varied(power, 2, 1),
          "the steps so far count in the average by its former value");
  }
  check("Muon bf16 remainder", varied("row_beta", 0.5, 0.1),
        "the kernels of a step are planned with it, and each new value would have them planned anew");
  check("Adagrad", varied("lr_decay", 0.5, 0.1),
        "it is a schedule of the learning rate itself, which counts from the first step");
  check("Adagrad", varied("initial_accumulator_value", 0.5, 0.1),
        "only the constructor of the optimizer reads it");
  CHECK(contains(vary_refused_of_layer<OneBitAdam>(OneBitAdamOptions().freeze_step(5).overlap_backward(true),
                                                   varied("beta1", 0.8, 0.9)),
                 "overlap_backward(true) sends the momentum of a step before the step begins"));
  CHECK(contains(vary_refused_of_layer<torch::optim::SGD>(
                     torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true), varied("dampening", 0.5, 0)),
                 "Nesterov's momentum is defined for a dampening of 0 only"));
  check("FusedSgd nesterov bf16 remainder", varied("dampening", 0.5, 0),
        "Nesterov's momentum is defined for a dampening of 0 only");
  CHECK(contains(vary_refused("FusedSgd", varied("momentum", 0.9, 0)),
                 "the momentum of FusedSgd must stay above 0"));
  CHECK(contains(vary_refused("FusedRmsprop", varied("momentum", 0.9, 0, {0})),
                 "the momentum of FusedRmsprop must stay above 0"));
  // What is near it may move.
  CHECK(vary_refused("OneBitAdam", varied("beta2", 0.9, 0.99, {1})) == "");
  CHECK(vary_refused_of_layer<OneBitAdam>(OneBitAdamOptions().freeze_step(5).overlap_backward(true),
                                          varied("weight_decay", 0.8, 0.9)) == "");
}

TEST_CASE("groups that are not there, or whose rule does not read the number, are refused",
          "[session][vary]") {
  check_vary_refused(
      "FusedAdamW", varied("weight_decay", 0.5, 0.25, {0, 2}),
      "Vary(\"weight_decay\") was given the parameter group 2, but pacer::FusedAdamW has 2, counted "
      "from 0; name one of them");
  check_vary_refused(
      "FusedAdamW", varied("weight_decay", 0.5, 0.25, {-1}),
      "Vary(\"weight_decay\") was given the parameter group -1, but pacer::FusedAdamW has 2, counted "
      "from 0; name one of them");
  for (const char* name : {"beta1", "beta2", "eps"}) {
    check_vary_refused(
        "Muon", varied(name, 0.5, 0.25, {1, 0}),
        std::string("Vary(\"") + name +
            "\"): the rule of parameter group 0 does not read it; leave the group out of groups()");
  }
  check_vary_refused(
      "Muon", varied("momentum", 0.95, 0.85, {0, 1}),
      "Vary(\"momentum\"): the rule of parameter group 1 does not read it; leave the group out of "
      "groups()");
}

TEST_CASE("an end that the number cannot have is refused before training", "[session][vary]") {
  const auto check = [](const char* optimizer, const VaryOptions& number, const std::string& says) {
    check_vary_refused(optimizer, number, "Vary(\"" + number.name() + "\"), parameter group 0: " + says);
  };
  check("FusedAdamW", varied("weight_decay", 0.1, -0.1),
        "weight_decay must be a finite number >= 0, not -0.1");
  check("SGD", varied("weight_decay", -0.1, 0.1), "weight_decay must be a finite number >= 0, not -0.1");
  check("AdamW", varied("beta1", 1, 0.9), "beta1 must be in [0, 1), not 1");
  check("OneBitAdam", varied("beta1", 0.9, -1), "beta1 must be in [0, 1), not -1");
  check("Muon", varied("momentum", 0.9, 1.5), "momentum must be in [0, 1), not 1.5");
  check("RMSprop", varied("momentum", 0.9, 0),
        "the momentum of torch::optim::RMSprop must stay above 0, because a state that began without one has "
        "no "
        "buffer for it; end at a small number instead");
  CHECK(vary_refused("SGD", varied("momentum", 0.9, 0)) == "");
  CHECK(contains(vary_refused("FusedLamb", varied("max_coeff", 1, 0.001)),
                 "max_coeff must be a finite number >= min_coeff (0.01), not 0.001"));
}

TEST_CASE("options of Vary that are missing or cannot be are refused", "[vary]") {
  const auto refused = [](const VaryOptions& options) {
    return message_of<InvalidArgument>([&] { Vary(options, constant_schedule()); });
  };
  const auto refused_with = [](const VaryOptions& options, const Vary::Function& function) {
    return message_of<InvalidArgument>([&] { Vary(options, constant_schedule(), function); });
  };
  CHECK(refused(VaryOptions("eps").at_one(1)) == "Vary(\"eps\") needs two values; give at_one and at_zero");
  CHECK(contains(refused(VaryOptions("eps").at_zero(1)), "needs two values"));
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kMost = std::numeric_limits<double>::max();
  CHECK(contains(refused(varied("eps", kInfinity, 1)), "must be finite, not inf and 1"));
  CHECK(contains(refused(varied("eps", 1, std::nan(""))), "must be finite, not 1 and nan"));
  CHECK(contains(refused(varied("eps", kMost, -kMost)), "the way between them, must be finite"));
  CHECK(contains(refused(varied("a/b", 1, 0)), "must not be empty and have no '/'"));
  CHECK(contains(refused(varied("", 1, 0)), "must not be empty"));
  CHECK(contains(refused(varied("eps", 1, 0, {0, 1, 0})), "was given a parameter group twice"));
  CHECK(contains(refused_with(varied("p", 1, 0), nullptr), "was given an empty function"));
  CHECK(contains(refused_with(varied("p", 1, 0, {0}), [](double) {}), "was given a function and groups"));
  CHECK(refused_with(varied("p", 1, -1), [](double) {}) == "");
}

TEST_CASE("two hooks for one number of one group are refused", "[session][vary]") {
  SmallModel model = small_model();
  const auto optimizer = all_optimizers().front().make(model->named_parameters(), nullptr);
  const auto refused = [&](const VaryOptions& first, const VaryOptions& second) {
    Session session(*model, *optimizer);
    session.use(Vary(first, constant_schedule()));
    return message_of<InvalidArgument>([&] { session.use(Vary(second, constant_schedule())); });
  };
  const auto decay = [](const std::vector<int64_t>& groups) { return varied("weight_decay", 1, 0, groups); };
  CHECK(contains(refused(decay({}), decay({})), "already has the hook vary_weight_decay; use it once"));
  CHECK(refused(decay({}), decay({1})) ==
        "Vary(\"weight_decay\") is there twice for the same parameter group; give each of them groups() of "
        "its own");
  CHECK(contains(refused(decay({0, 1}), decay({1})), "twice for the same parameter group"));
  CHECK(contains(refused(decay({0}), decay({})), "twice for the same parameter group"));
  CHECK(refused(decay({0}), decay({1})) == "");
  CHECK(refused(decay({}), varied("beta1", 0.5, 0)) == "");
}

TEST_CASE("a number changed behind the hook's back is refused, and nothing is stepped", "[session][vary]") {
  for (const char* name : {"FusedAdamW", "AdamW"}) {
    for (const RegisteredOptimizer& entry : all_optimizers()) {
      if (entry.name != name) continue;
      SmallModel model = small_model();
      const auto optimizer = entry.make(model->named_parameters(), nullptr);
      Session session(*model, *optimizer);
      session.use(Vary(varied("weight_decay", 0.5, 0.25), warmup_linear({0, 4})));
      const auto begin_step = [&] {
        const auto batch = small_batch(0);
        auto [x, y] = session.begin(batch.first, batch.second);
        session.backward(model->loss(x, y));
      };
      begin_step();
      session.step();
      // Options of torch's type lie as pacer's do.
      auto& options = static_cast<torch::optim::AdamWOptions&>(optimizer->param_groups()[1].options());
      CHECK(options.weight_decay() == 0.5);
      options.weight_decay(0.75);
      begin_step();
      const Tensor before = model->head->weight.detach().clone();
      CHECK(message_of<InvalidArgument>([&] { session.step(); }) ==
            "weight_decay of parameter group 1 was changed from 0.5 to 0.75 although a Vary hook sets it; "
            "change the "
            "hook's values, or leave it out");
      CHECK(same_bits(model->head->weight, before));
      options.weight_decay(0.5);  // put right, the same step can be taken
      CHECK(session.step());
      CHECK(options.weight_decay() == 0.4375);
    }
  }
}

TEST_CASE("a trust ratio is not frozen while a number that it follows from moves", "[session][vary]") {
  const auto settled_after = [](auto optimizer, const VaryOptions& number, int64_t steps) {
    SmallModel model = small_model();
    const auto made = optimizer(model);
    Session session(*model, *made);
    const auto hook = std::make_shared<Vary>(number, warmup_linear({0, 4}));
    session.use(hook);
    Progress progress;
    progress.step = steps;
    return hook->settled(progress);
  };
  const auto lamb = [](const OneBitLambOptions& options) {
    return [=](SmallModel& model) {
      return std::make_unique<OneBitLamb>(model->named_parameters(),
                                          OneBitLambOptions(options).freeze_step(9));
    };
  };
  const auto adam = [](SmallModel& model) {
    return std::make_unique<OneBitAdam>(model->named_parameters(), OneBitAdamOptions().freeze_step(9));
  };
  const OneBitLambOptions plain;
  for (const char* name : {"weight_decay", "beta1", "eps"}) {
    CAPTURE(name);
    CHECK_FALSE(settled_after(lamb(plain), varied(name, 0.5, 0.25), 3));
    CHECK(settled_after(lamb(plain), varied(name, 0.5, 0.25), 4));
    CHECK(settled_after(lamb(OneBitLambOptions().adapt(false)), varied(name, 0.5, 0.25), 3));
    CHECK(settled_after(adam, varied(name, 0.5, 0.25), 3));
  }
  CHECK(settled_after(lamb(plain), varied("factor_max", 3, 2), 3));
  CHECK(settled_after(lamb(OneBitLambOptions().compress(false)), varied("weight_decay", 0.5, 0.25), 3));

  SmallModel model = small_model();
  const auto optimizer = lamb(plain)(model);
  Session session(*model, *optimizer);
  session.use(Vary(varied("weight_decay", 0.5, 0.25), warmup_linear({0, 10})));
  const auto batch = small_batch(0);
  const std::string message =
      message_of<InvalidArgument>([&] { auto data = session.begin(batch.first, batch.second); });
  CHECK(contains(message, "the hook vary_weight_decay"));
  CHECK(contains(message, "allow_early_freeze"));
}

}  // namespace pacer::testing
