// Vary in a Session: each number of each optimizer as a loop sets it by hand, groups, several at once, functions of
// the user's, and runs that go on. What it refuses is in vary_refusals.cpp.
#include <cmath>

#include <pacer/hooks/step_report.h>
#include <pacer/schedulers/vary.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing {
namespace {

using torch::optim::OptimizerOptions;

// One of a registered optimizer's numbers, with a setter of its own.
struct VariedNumber {
  const char* optimizer;
  const char* name;
  double at_one, at_zero;
  void (*set)(OptimizerOptions&, double);
  std::vector<int64_t> given = {};      // to VaryOptions::groups
  std::vector<size_t> groups = {0, 1};  // that have it
};

#define PACER_VARIED(Options, name) \
  [](OptimizerOptions& options, double value) { static_cast<Options&>(options).name(value); }

template <class Options, int index>
void set_beta(OptimizerOptions& options, double value) {
  std::get<index>(static_cast<Options&>(options).betas()) = value;
}

template <class Options>
void add_varied(const char* optimizer, std::vector<VariedNumber>& all,
                const std::vector<size_t>& of_betas = {0, 1},
                const std::vector<int64_t>& given_for_beta2 = {}) {
  const std::vector<size_t> of_beta2 =
      given_for_beta2.empty() ? of_betas
                              : std::vector<size_t>(given_for_beta2.begin(), given_for_beta2.end());
  all.push_back({optimizer, "weight_decay", 0.5, 0.25, PACER_VARIED(Options, weight_decay)});
  all.push_back({optimizer, "beta1", 0.8, 0.95, set_beta<Options, 0>, {}, of_betas});
  all.push_back({optimizer, "beta2", 0.9, 0.99, set_beta<Options, 1>, given_for_beta2, of_beta2});
  all.push_back({optimizer, "eps", 1e-2, 1e-4, PACER_VARIED(Options, eps), {}, of_betas});
}

std::vector<VariedNumber> varied_numbers() {
  using namespace torch::optim;
  std::vector<VariedNumber> all;
  add_varied<FusedAdamOptions>("FusedAdam", all);
  add_varied<FusedAdamWOptions>("FusedAdamW", all);
  add_varied<FusedAdamWOptions>("FusedAdamW 8 bits", all);
  add_varied<FusedLambOptions>("FusedLamb", all);
  add_varied<FusedLambOptions>("FusedLamb 8 bits", all);
  all.push_back({"FusedLamb", "min_coeff", 0.8, 0.2, PACER_VARIED(FusedLambOptions, min_coeff)});
  all.push_back({"FusedLamb", "max_coeff", 0.8, 0.2, PACER_VARIED(FusedLambOptions, max_coeff)});
  all.push_back({"FusedSgd", "weight_decay", 0.5, 0.25, PACER_VARIED(FusedSgdOptions, weight_decay)});
  all.push_back({"FusedSgd", "momentum", 0.9, 0.5, PACER_VARIED(FusedSgdOptions, momentum)});
  all.push_back({"FusedSgd", "dampening", 0.5, 0, PACER_VARIED(FusedSgdOptions, dampening)});
  const std::vector<size_t> matrices = {0}, vectors = {1};
  all.push_back({"FusedRmsprop", "weight_decay", 0.5, 0.25, PACER_VARIED(FusedRmspropOptions, weight_decay)});
  all.push_back({"FusedRmsprop", "alpha", 0.9, 0.99, PACER_VARIED(FusedRmspropOptions, alpha)});
  all.push_back({"FusedRmsprop", "eps", 1e-3, 1e-2, PACER_VARIED(FusedRmspropOptions, eps)});
  all.push_back(
      {"FusedRmsprop", "momentum", 0.9, 0.5, PACER_VARIED(FusedRmspropOptions, momentum), {}, matrices});
  add_varied<MuonOptions>("Muon", all, vectors);
  all.push_back({"Muon", "momentum", 0.95, 0.85, PACER_VARIED(MuonOptions, momentum), {}, matrices});
  add_varied<OneBitMuonOptions>("OneBitMuon", all, vectors);
  all.push_back(
      {"OneBitMuon", "momentum", 0.95, 0.85, PACER_VARIED(OneBitMuonOptions, momentum), {}, matrices});
  add_varied<OneBitAdamOptions>("OneBitAdam", all, {0, 1}, {1});
  add_varied<OneBitLambOptions>("OneBitLamb", all, {0, 1}, {1});
  all.push_back(
      {"OneBitLamb", "factor_max", 1.5, 0.75, PACER_VARIED(OneBitLambOptions, factor_max), {}, matrices});
  add_varied<AdamOptions>("Adam", all);
  add_varied<AdamWOptions>("AdamW", all);
  using FreeOptions = ScheduleFreeAdamWOptions;
  all.push_back({"ScheduleFreeAdamW", "weight_decay", 0.5, 0.25, PACER_VARIED(FreeOptions, weight_decay)});
  all.push_back({"ScheduleFreeAdamW", "beta2", 0.9, 0.99, set_beta<FreeOptions, 1>});
  all.push_back({"ScheduleFreeAdamW", "eps", 1e-2, 1e-4, PACER_VARIED(FreeOptions, eps)});
  all.push_back({"Lion", "weight_decay", 0.5, 0.25, PACER_VARIED(OwnRuleOptions, weight_decay)});
  all.push_back({"Lion", "beta1", 0.8, 0.95, set_beta<OwnRuleOptions, 0>});
  all.push_back({"Lion", "beta2", 0.9, 0.99, set_beta<OwnRuleOptions, 1>});
  all.push_back({"SGD", "weight_decay", 0.5, 0.25, PACER_VARIED(SGDOptions, weight_decay)});
  all.push_back({"SGD", "momentum", 0.9, 0.5, PACER_VARIED(SGDOptions, momentum)});
  all.push_back({"SGD", "dampening", 0.5, 0, PACER_VARIED(SGDOptions, dampening)});
  all.push_back({"RMSprop", "weight_decay", 0.5, 0.25, PACER_VARIED(RMSpropOptions, weight_decay)});
  all.push_back({"RMSprop", "momentum", 0.9, 0.5, PACER_VARIED(RMSpropOptions, momentum)});
  all.push_back({"RMSprop", "alpha", 0.9, 0.99, PACER_VARIED(RMSpropOptions, alpha)});
  all.push_back({"RMSprop", "eps", 1e-2, 1e-4, PACER_VARIED(RMSpropOptions, eps)});
  all.push_back({"Adagrad", "weight_decay", 0.5, 0.25, PACER_VARIED(AdagradOptions, weight_decay)});
  all.push_back({"Adagrad", "eps", 1e-2, 1e-4, PACER_VARIED(AdagradOptions, eps)});
  return all;
}

const RegisteredOptimizer& registered_as(const std::string& name) {
  static const std::vector<RegisteredOptimizer> all = all_optimizers();
  for (const RegisteredOptimizer& entry : all) {
    if (entry.name == name) return entry;
  }
  throw std::runtime_error("no optimizer is registered as " + name);
}

// Up to at_one in two steps, and down to at_zero in step 6.
LearningRateSchedule up_and_down() { return warmup_linear({2, 5}); }
double up_and_down(int64_t q, double one, double zero) {
  if (q == 1 || q == 2) return one;
  const double factor = q == 0 ? 0.5 : q >= 5 ? 0 : 1 - (static_cast<double>(q) - 2) / 3;
  return zero + (one - zero) * factor;
}

// The parameters after 7 steps without a Session; set(groups, q) comes before step q.
template <class Set>
std::vector<Tensor> trained_by_hand(const RegisteredOptimizer& entry, const Set& set) {
  SmallModel model = small_model();
  model->to(entry.dtype);
  const auto optimizer = entry.make(model->named_parameters(), Communicator::alone(at::kCPU));
  for (int64_t q = 0; q < 7; ++q) {
    const auto batch = small_batch(q);
    model->loss(batch.first, batch.second).backward();
    set(optimizer->param_groups(), q);
    optimizer->step();
    optimizer->zero_grad();
  }
  return model->parameters();
}

std::vector<Tensor> trained_with(const RegisteredOptimizer& entry, const std::function<void(Session&)>& use) {
  SmallRun run(entry, {{"vary", "vary", false, [&](Session& s, SmallModel&, EpochSampler&) { use(s); }}}, 0);
  for (int64_t q = 0; q < 7; ++q) run.step();
  return run.model->parameters();
}

bool all_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = same_bits(a[i].detach(), b[i].detach());
  return same;
}

// Keeps what the report says of a name.
class ReportedNumber : public Hook {
 public:
  ReportedNumber(std::string number, std::vector<double>& values)
      : number_(std::move(number)), values_(&values) {}
  std::string hook_name() const override { return "reported_number"; }
  Slot slot() const override { return Slot::record; }
  void after_step(StepReport& report) override {
    for (const auto& [name, value] : report.numbers()) {
      if (name == number_) values_->push_back(value);
    }
  }

 private:
  std::string number_;
  std::vector<double>* values_;
};

double decay_of_group(const torch::optim::Optimizer& optimizer, size_t group) {
  return static_cast<const FusedAdamWOptions&>(optimizer.param_groups()[group].options()).weight_decay();
}

}  // namespace

TEST_CASE("each number of each optimizer moves as in a loop that sets it by hand", "[session][vary]") {
  for (const VariedNumber& number : varied_numbers()) {
    CAPTURE(number.optimizer, number.name);
    const CapturedStderr quiet;
    const RegisteredOptimizer& entry = registered_as(number.optimizer);
    const auto by_hand = [&](bool moves) {
      return trained_by_hand(entry, [&](auto& groups, int64_t q) {
        for (const size_t g : number.groups) {
          number.set(groups[g].options(),
                     moves ? up_and_down(q, number.at_one, number.at_zero) : number.at_one);
        }
      });
    };
    const auto varied = trained_with(entry, [&](Session& session) {
      session.use(
          Vary(VaryOptions(number.name).at_one(number.at_one).at_zero(number.at_zero).groups(number.given),
               up_and_down()));
    });
    CHECK(all_same_bits(varied, by_hand(true)));
    CHECK_FALSE(all_same_bits(varied, by_hand(false)));  // it has an effect
  }
}

TEST_CASE("only the groups that are named move, and two numbers move by themselves", "[session][vary]") {
  const RegisteredOptimizer& entry = registered_as("FusedAdamW");
  std::vector<double> reported;
  const auto varied = trained_with(entry, [&](Session& s) {
    s.use(Vary(VaryOptions("weight_decay").at_one(0.5).at_zero(0.25).groups({0}), up_and_down()));
    s.use(Vary(VaryOptions("weight_decay").at_one(0).at_zero(0.125).groups({1}), constant_schedule({4})));
    s.use(Vary(VaryOptions("beta1").at_one(0.8).at_zero(0.95), up_and_down()));
    s.use(ReportedNumber("weight_decay_of_1", reported));
  });
  CHECK(all_same_bits(varied, trained_by_hand(entry, [](auto& groups, int64_t q) {
                        auto& matrices = static_cast<FusedAdamWOptions&>(groups[0].options());
                        auto& vectors = static_cast<FusedAdamWOptions&>(groups[1].options());
                        matrices.weight_decay(up_and_down(q, 0.5, 0.25));
                        vectors.weight_decay(q >= 3 ? 0 : 0.125 - 0.125 * static_cast<double>(q + 1) / 4);
                        std::get<0>(matrices.betas()) = up_and_down(q, 0.8, 0.95);
                        std::get<0>(vectors.betas()) = up_and_down(q, 0.8, 0.95);
                      })));
  CHECK(reported == std::vector<double>{0.09375, 0.0625, 0.03125, 0, 0, 0, 0});
}

TEST_CASE("values at the ends of a schedule are exactly those given", "[vary]") {
  const Vary decay(VaryOptions("weight_decay").at_one(0.1).at_zero(0.01), warmup_cosine({1, 9}));
  const auto at = [&](const Vary& hook, int64_t step) {
    Progress progress;
    progress.step = step;
    return hook.value(progress);
  };
  CHECK(at(decay, 0) == 0.1);
  CHECK(at(decay, 9) == 0.01);
  CHECK(std::abs(at(decay, 5) - 0.055) < 1e-15);
  const Vary rounded(VaryOptions("beta1").at_one(0.9).at_zero(0.3), constant_schedule());
  REQUIRE(0.3 + (0.9 - 0.3) != 0.9);
  CHECK(at(rounded, 0) == 0.9);
  // A warm-up leads the other way: the first step has begun it.
  const Vary momentum(VaryOptions("momentum").at_zero(0.85).at_one(0.95), constant_schedule({300}));
  CHECK(std::abs(at(momentum, 0) - (0.85 + 0.1 / 300)) < 1e-15);
  CHECK(std::abs(at(momentum, 149) - 0.9) < 1e-15);
  CHECK(at(momentum, 299) == 0.95);
  CHECK(at(momentum, 5'000) == 0.95);
  for (int64_t step = 0; step < 300; ++step) CHECK(at(momentum, step) <= at(momentum, step + 1));
}

TEST_CASE("a function is called before the forward pass of each micro-step", "[session][vary]") {
  SmallModel model = small_model();
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Session session(*model, optimizer);
  std::vector<double> reported, read, called;
  session.use(GradientAccumulation(2))
      .use(ReportedNumber("scale", reported))
      .use(Vary(VaryOptions("scale").at_one(1).at_zero(0.5), warmup_linear({0, 4}), [&](double scale) {
        model->logit_scale = scale;
        called.push_back(scale);
      }));
  CHECK(called.empty());
  model->logit_scale = 7;
  for (int64_t i = 0; i < 6; ++i) {
    const auto batch = small_batch(i);
    auto [x, y] = session.begin(batch.first, batch.second);
    read.push_back(model->logit_scale);
    model->logit_scale = 7;  // nothing but the next call puts it right
    session.backward(model->loss(x, y));
    session.step();
  }
  CHECK(read == std::vector<double>{1, 1, 0.875, 0.875, 0.75, 0.75});
  CHECK(called == std::vector<double>{1, 1, 1, 0.875, 0.875, 0.75, 0.75});  // when training starts, too
  CHECK(reported == std::vector<double>{1, 0.875, 0.75});
}

TEST_CASE("a group that is added later moves from its first step on", "[session][vary]") {
  const CapturedStderr quiet;
  SmallModel model = small_model();
  const FusedAdamWOptions options = FusedAdamWOptions(0.01).weight_decay(0.75);
  FusedAdamW optimizer(model->stack->named_parameters(), options);
  Session session(*model, optimizer);
  session.use(Vary(VaryOptions("weight_decay").at_one(0.5).at_zero(0.25), warmup_linear({0, 4})));
  for (int64_t q = 0; q < 3; ++q) {
    if (q == 2)
      optimizer.add_param_group({model->head->parameters(), std::make_unique<FusedAdamWOptions>(options)});
    const auto batch = small_batch(q);
    auto [x, y] = session.begin(batch.first, batch.second);
    session.backward(model->loss(x, y));
    session.step();
  }
  CHECK(decay_of_group(optimizer, 0) == 0.375);
  CHECK(decay_of_group(optimizer, 1) == 0.375);
}

TEST_CASE("a run that goes on has the bits of one that was not interrupted", "[session][vary]") {
  const auto hook = [](const std::string& folder) {
    return RegisteredHook{"vary", "vary", false, [=](Session& s, SmallModel& m, EpochSampler&) {
                            s.use(Vary(VaryOptions("weight_decay").at_one(0.5).at_zero(0.25), up_and_down()))
                                .use(Vary(VaryOptions("scale").at_one(1).at_zero(0.5), up_and_down(),
                                          [model = m.ptr()](double scale) { model->logit_scale = scale; }))
                                .use(Checkpoints(CheckpointsOptions(folder).every(4)));
                          }};
  };
  for (const char* name : {"FusedAdamW", "OneBitLamb", "AdamW"}) {
    CAPTURE(name);
    const CapturedStderr quiet;
    const TemporaryFolder folder;
    const RegisteredOptimizer& entry = registered_as(name);
    SmallRun whole(entry, {hook(folder.path("whole"))}, 0), first(entry, {hook(folder.path("parts"))}, 0);
    for (int64_t q = 0; q < 7; ++q) whole.step();
    for (int64_t q = 0; q < 4; ++q) first.step();
    first.finish();
    SmallRun second(entry, {hook(folder.path("parts"))}, 0);
    REQUIRE(second.resume() == 4);
    for (int64_t q = 4; q < 7; ++q) second.step();
    CHECK(first_difference(whole.state(), second.state()) == "");
  }
}

TEST_CASE("a run that goes on may have other values in what has not begun, and in nothing else",
          "[session][vary]") {
  const TemporaryFolder folder;
  const auto resumed = [&](double one, double zero, int64_t total, int64_t steps) {
    const auto use = [&](Session& s, SmallModel&, EpochSampler&) {
      s.use(Vary(VaryOptions("weight_decay").at_one(one).at_zero(zero),
                 warmup_stable_decay(LearningRateScheduleOptions(0, total).decay_steps(4))))
          .use(Checkpoints(CheckpointsOptions(folder.path()).every(2)));
    };
    SmallRun run(registered_as("FusedAdamW"), {{"vary", "vary", false, use}}, 0);
    const std::string message = message_of<InvalidArgument>([&] { run.resume(); });
    if (!message.empty()) return message;
    while (run.session->progress().step < steps) run.step();
    run.finish();
    return std::to_string(decay_of_group(*run.optimizer, 0)) + " " +
           std::to_string(decay_of_group(*run.optimizer, 1));
  };
  CHECK(resumed(0.5, 0.25, 20, 4) == "0.500000 0.500000");
  CHECK(contains(resumed(0.5 + 1e-11, 0.25, 20, 4),
                 "would take step 5 with weight_decay at 0.5, but this Vary"));
  CHECK(contains(resumed(0.5, 0.25, 7, 4), "may only change in what has not begun"));
  // The decay may begin in another step, and lead elsewhere.
  CHECK(resumed(0.5, 0, 8, 7) == "0.250000 0.250000");
  CHECK(contains(resumed(0.5, 0.25, 8, 8), "would take step 8 with weight_decay at 0.125"));
  CHECK(resumed(0.5, 0, 8, 9) == "0.000000 0.000000");
}

}  // namespace pacer::testing
