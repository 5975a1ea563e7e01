// What FusedAdam and FusedAdamW refuse. Every refusal is an InvalidArgument that says where and what, and comes before
// anything has changed: values, gradients, moments, step counts, options.
#include "support/catch.h"

#include <limits>

#include "support/twins.h"

namespace pacer::testing {
namespace {

// A running optimizer over named parameters, into which one bad thing is put.
struct Victim {
  std::vector<Tensor> parameters = random_parameters({{3, 4}, {5}, {6}}, at::kFloat);
  NamedParameters named;
  FusedAdamW optimizer;

  explicit Victim(const FusedAdamWOptions& options = FusedAdamWOptions(0.1).amsgrad(true))
      : named(with_names(parameters)), optimizer(named, options) {
    set_random_gradients(parameters);
    optimizer.step();
    set_random_gradients(parameters);
  }
  static NamedParameters with_names(const std::vector<Tensor>& parameters) {
    NamedParameters names;
    names.insert("encoder.weight", parameters[0]);
    names.insert("encoder.bias", parameters[1]);
    names.insert("head.weight", parameters[2]);
    return names;
  }
  std::string unless_step_refused(const std::vector<std::string>& parts) {
    return unless_refused(optimizer, parts, [&] { optimizer.step(); });
  }
  // It goes on as if nothing had happened.
  bool recovers() {
    set_random_gradients(parameters);
    optimizer.step();
    return state_of(optimizer, parameters[0]).step() == 2 && state_of(optimizer, parameters[2]).step() == 2;
  }
};

struct BadGradient {
  const char* name;
  Tensor (*make)(const Tensor& parameter);
  std::vector<std::string> parts;
};

TEST_CASE("a gradient that does not fit is refused by the parameter's name", "[fused_adam]") {
  const std::vector<BadGradient> bad = {
      {"sparse", [](const Tensor& p) { return torch::ones(p.sizes()).to_sparse(); }, {"sparse"}},
      {"sparse rows", [](const Tensor&) { return torch::ones({3, 4}).to_sparse_csr(); }, {"parse"}},
      {"fp64", [](const Tensor& p) { return torch::ones(p.sizes(), at::kDouble); }, {"dtype"}},
      {"bf16", [](const Tensor& p) { return torch::ones(p.sizes(), at::kBFloat16); }, {"dtype"}},
      {"integer", [](const Tensor& p) { return torch::ones(p.sizes(), at::kLong); }, {"dtype"}},
      {"complex", [](const Tensor& p) { return torch::ones(p.sizes(), at::kComplexFloat); }, {"dtype"}},
      {"longer", [](const Tensor& p) { return torch::ones({p.size(0) + 1}); }, {"shape"}},
      {"flattened", [](const Tensor& p) { return torch::ones({p.numel() / 2, 2}); }, {"shape"}},
      {"one number", [](const Tensor&) { return torch::ones({}); }, {"shape"}},
      {"elsewhere", [](const Tensor& p) { return torch::empty(p.sizes(), at::kMeta); }, {"meta"}},
  };
  const std::vector<std::string> names = {"encoder.weight", "encoder.bias", "head.weight"};
  for (const BadGradient& gradient : bad) {
    for (size_t i = 0; i < 3; ++i) {
      if (std::string(gradient.name) == "flattened" && i == 1) continue;  // has an odd number of elements
      CAPTURE(gradient.name, i);
      Victim victim;
      victim.parameters[i].mutable_grad() = gradient.make(victim.parameters[i]);
      auto parts = gradient.parts;
      parts.push_back(names[i]);
      CHECK(victim.unless_step_refused(parts) == "");
      CHECK(victim.recovers());
    }
  }
}

TEST_CASE("a bad gradient at the very first step leaves no state behind", "[fused_adam]") {
  const auto parameters = random_parameters({{3}, {4}}, at::kFloat);
  FusedAdam optimizer(parameters);
  set_random_gradients(parameters);
  parameters[1].mutable_grad() = torch::ones({4}, at::kDouble);
  CHECK(unless_refused(optimizer, {"0.1"}, [&] { optimizer.step(); }) == "");
  CHECK(optimizer.state().empty());
}

struct BadParameter {
  const char* name;
  Tensor (*make)();
  std::vector<std::string> parts;
};

TEST_CASE("a parameter that cannot be stepped is refused, however it comes in", "[fused_adam]") {
  const std::vector<BadParameter> bad = {
      {"undefined", [] { return Tensor(); }, {}},
      {"integer", [] { return torch::zeros({3}, at::kInt); }, {"dtype"}},
      {"bool", [] { return torch::zeros({3}, at::kBool); }, {"dtype"}},
      {"complex", [] { return torch::zeros({3}, at::kComplexDouble); }, {"dtype"}},
      {"fp8", [] { return torch::zeros({3}).to(at::kFloat8_e4m3fn); }, {"dtype"}},
      {"sparse", [] { return torch::ones({3}).to_sparse(); }, {}},
      {"meta", [] { return torch::empty({3}, at::kMeta); }, {"meta"}},
      {"expanded", [] { return torch::zeros({1}).expand({3}); }, {}},
      {"expanded rows", [] { return torch::zeros({3, 1}).expand({3, 4}); }, {}},
      {"overlapping rows", [] { return torch::zeros({6}).as_strided({3, 3}, {1, 1}); }, {}},
  };
  for (const BadParameter& parameter : bad) {
    CAPTURE(parameter.name);
    Victim victim;
    const Tensor tensor = parameter.make();
    const auto parts = [&](const char* where) {
      auto all = parameter.parts;
      all.emplace_back(where);
      return all;
    };
    const auto constructed = refusal([&] {
      FusedAdamW optimizer({victim.parameters[0], tensor});
      if (tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta()) {
        tensor.mutable_grad() = torch::ones_like(tensor, at::MemoryFormat::Contiguous);
      }
      optimizer.step();
    });
    CAPTURE(constructed);
    for (const auto& part : parts("0.1")) CHECK(contains(constructed, part));
    if (tensor.defined()) tensor.mutable_grad() = Tensor();

    CHECK(unless_refused(victim.optimizer, parts("1.1"), [&] {
            victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({random_parameters({{2}}, at::kFloat)[0], tensor}));
          }) == "");
    CHECK(victim.optimizer.param_groups().size() == 1);

    if (!tensor.defined()) continue;
    NamedParameters named;
    named.insert("odd.one", tensor);
    CHECK(unless_refused(victim.optimizer, parts("odd.one"),
                         [&] { victim.optimizer.add_param_group(NamedParamGroup(named)); }) == "");
    CHECK(victim.optimizer.parameter_name(tensor) == "unknown");

    if (tensor.layout() != at::kStrided || tensor.is_meta()) continue;
    victim.optimizer.param_groups()[0].params().push_back(tensor);  // by hand
    tensor.mutable_grad() = torch::ones_like(tensor, at::MemoryFormat::Contiguous);
    CHECK(victim.unless_step_refused(parts("0.3")) == "");
    victim.optimizer.param_groups()[0].params().pop_back();
    CHECK(victim.recovers());
  }
}

TEST_CASE("a tensor given twice is refused, however it comes in", "[fused_adam]") {
  Victim victim;
  const Tensor weight = victim.parameters[0];
  const auto other = random_parameters({{2}}, at::kFloat);
  CHECK(contains(refusal([&] { FusedAdam({other[0], weight, weight}); }), "0.2"));
  CHECK(contains(refusal([&] {
          FusedAdam({torch::optim::OptimizerParamGroup({weight}), torch::optim::OptimizerParamGroup({other[0], weight})});
        }),
                 "1.1"));
  NamedParameters tied;
  tied.insert("wte.weight", weight);
  tied.insert("lm_head.weight", weight);
  const std::string message = refusal([&] { FusedAdam{tied}; });
  CHECK(contains(message, "wte.weight"));
  CHECK(contains(message, "twice"));

  CHECK(unless_refused(victim.optimizer, {"encoder.weight", "twice"},
                       [&] { victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight})); }) == "");
  static_cast<torch::optim::Optimizer&>(victim.optimizer).param_groups()[0].params().push_back(weight);
  CHECK(victim.unless_step_refused({"encoder.weight", "twice"}) == "");
  victim.optimizer.param_groups()[0].params().pop_back();
  CHECK(victim.recovers());
}

TEST_CASE("parameters that share memory are refused", "[fused_adam]") {
  const auto refused = [](const Tensor& a, const Tensor& b) {
    const std::vector<Tensor> parameters = {a.detach().requires_grad_(), b.detach().requires_grad_()};
    FusedAdamW optimizer(parameters);
    set_random_gradients(parameters);
    const std::string result = unless_refused(optimizer, {"0.0", "0.1"}, [&] { optimizer.step(); });
    return result;
  };
  const Tensor memory = torch::randn({24});
  CHECK(refused(memory, memory) == "");
  CHECK(refused(memory.slice(0, 0, 13), memory.slice(0, 12)) == "");
  CHECK(refused(memory.slice(0, 12), memory.slice(0, 0, 13)) == "");
  CHECK(refused(memory, memory.slice(0, 23)) == "");
  CHECK(refused(memory.view({4, 6}), memory.view({4, 6}).t()) == "");
  CHECK(refused(memory.slice(0, 0, 24, 2), memory.slice(0, 10, 11)) == "");
  CHECK(refused(memory.slice(0, 0, 12), memory.slice(0, 12)) == "<no exception>");
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();

// Left to torch's own check, so torch's exception.
TEST_CASE("a parameter that is no leaf is refused as torch refuses it", "[fused_adam]") {
  Victim victim;
  const auto leaf = random_parameters({{3}}, at::kFloat);
  const auto before = snapshot(victim.optimizer);
  CHECK(contains(refusal([&] { FusedAdamW({leaf[0] * 2}); }), "non-leaf"));
  CHECK(contains(refusal([&] { victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({leaf[0] * 2})); }),
                 "non-leaf"));
  CHECK(difference(before, snapshot(victim.optimizer)) == "");
}

// A learning rate of -1 and the like: (apply, what the message must name).
struct BadOption {
  void (*apply)(FusedAdamWOptions&);
  std::vector<std::string> parts;
};

const std::vector<BadOption>& bad_options() {
  static const std::vector<BadOption> bad = {
      {[](auto& o) { o.lr(-0.125); }, {"lr", "-0.125", ">= 0"}},
      {[](auto& o) { o.lr(kNaN); }, {"lr", "nan", ">= 0"}},
      {[](auto& o) { o.lr(kInf); }, {"lr", "inf", ">= 0"}},
      {[](auto& o) { o.betas({-0.5, 0.9}); }, {"beta", "-0.5", "[0, 1)"}},
      {[](auto& o) { o.betas({1.0, 0.9}); }, {"beta", "1", "[0, 1)"}},
      {[](auto& o) { o.betas({kNaN, 0.9}); }, {"beta", "nan", "[0, 1)"}},
      {[](auto& o) { o.betas({0.9, -0.25}); }, {"beta", "-0.25", "[0, 1)"}},
      {[](auto& o) { o.betas({0.9, 1.5}); }, {"beta", "1.5", "[0, 1)"}},
      {[](auto& o) { o.betas({0.9, kInf}); }, {"beta", "inf", "[0, 1)"}},
      {[](auto& o) { o.eps(-1e-3); }, {"eps", "-0.001", ">= 0"}},
      {[](auto& o) { o.eps(kNaN); }, {"eps", "nan", ">= 0"}},
      {[](auto& o) { o.eps(kInf); }, {"eps", "inf", ">= 0"}},
      {[](auto& o) { o.weight_decay(-2); }, {"weight_decay", "-2", ">= 0"}},
      {[](auto& o) { o.weight_decay(kNaN); }, {"weight_decay", "nan", ">= 0"}},
      {[](auto& o) { o.weight_decay(kInf); }, {"weight_decay", "inf", ">= 0"}},
      {[](auto& o) { o.rounding(Rounding::stochastic).master_weights(MasterWeights::fp32); }, {"stochastic", "master"}},
      {[](auto& o) { o.rounding(Rounding::stochastic).master_weights(MasterWeights::remainder); }, {"stochastic", "master"}},
  };
  return bad;
}

TEST_CASE("a bad option is refused by name, value and range, whenever it is set", "[fused_adam]") {
  for (const BadOption& bad : bad_options()) {
    CAPTURE(bad.parts[0], bad.parts[1]);
    FusedAdamWOptions options(0.1);
    bad.apply(options);
    const auto parameters = random_parameters({{2}}, at::kFloat);
    const auto group = [&] {
      return torch::optim::OptimizerParamGroup(parameters, std::make_unique<FusedAdamWOptions>(options));
    };
    for (const auto& part : bad.parts) {
      CHECK(contains(refusal([&] { FusedAdamW(parameters, options); }), part));
      CHECK(contains(refusal([&] { FusedAdamW({group()}); }), part));
    }
    Victim victim;
    CHECK(unless_refused(victim.optimizer, bad.parts, [&] { victim.optimizer.add_param_group(group()); }) == "");
    CHECK(victim.optimizer.param_groups().size() == 1);

    CHECK(unless_refused(victim.optimizer, bad.parts, [&] {
            // Put back before the comparison: a NaN does not equal itself.
            const FusedAdamWOptions good = options_of(victim.optimizer);
            bad.apply(options_of(victim.optimizer));
            try {
              victim.optimizer.step();
            } catch (...) {
              options_of(victim.optimizer) = good;
              throw;
            }
          }) == "");
    CHECK(victim.recovers());
  }
}

TEST_CASE("zero is a good value of every option that may be zero", "[fused_adam]") {
  Twins<FusedAdam> twins(random_parameters({{5}}, at::kDouble), torch::optim::AdamOptions(0).betas({0, 0}).eps(0));
  twins.step_with_random_gradients();
  options_of(twins.optimizer).lr(0.1);
  options_of(twins.peer).lr(0.1);
  twins.step_with_random_gradients();
  CHECK(twins.apart() <= 1e-14);
}

TEST_CASE("finite_check that differs between groups is refused", "[fused_adam]") {
  const auto parameters = random_parameters({{2}, {3}}, at::kFloat);
  const auto group = [&](size_t i, bool check) {
    return torch::optim::OptimizerParamGroup(
        {parameters[i]}, std::make_unique<FusedAdamWOptions>(FusedAdamWOptions(0.1).finite_check(check)));
  };
  set_random_gradients(parameters);
  for (const bool first : {false, true}) {
    const std::string message = refusal([&] { FusedAdamW({group(0, first), group(1, !first)}).step(); });
    CHECK(contains(message, "finite_check"));
    FusedAdamW optimizer({group(0, first), group(1, first)});
    optimizer.step();
    options_of(optimizer, 1).finite_check(!first);
    CHECK(unless_refused(optimizer, {"finite_check", "1"}, [&] { optimizer.step(); }) == "");
    options_of(optimizer, 0).finite_check(!first);
    optimizer.step();
    CHECK(state_of(optimizer, parameters[0]).step() == 2);
  }
}

TEST_CASE("fp16 without an fp32 master copy is refused", "[fused_adam]") {
  for (const auto master : {MasterWeights::remainder, MasterWeights::none}) {
    const auto parameters = random_parameters({{2}, {3}}, at::kHalf);
    set_random_gradients(parameters);
    const auto options = FusedAdamWOptions(0.1).master_weights(master);
    CHECK(contains(refusal([&] { FusedAdamW(parameters, options).step(); }), "0.0"));
    FusedAdamW optimizer(parameters);
    optimizer.step();
    options_of(optimizer).master_weights(master);
    CHECK(unless_refused(optimizer, {"0.0", "fp16"}, [&] { optimizer.step(); }) == "");
  }
}

TEST_CASE("names come from the module, the group, or the position", "[fused_adam]") {
  Victim victim;
  CHECK(victim.optimizer.parameter_name(victim.parameters[0]) == "encoder.weight");
  CHECK(victim.optimizer.parameter_name(victim.parameters[2]) == "head.weight");
  const auto more = random_parameters({{2}, {3}, {4}}, at::kFloat);
  NamedParameters named;
  named.insert("late.weight", more[0]);
  victim.optimizer.add_param_group(NamedParamGroup(named, std::make_unique<FusedAdamWOptions>(0.5)));
  victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({more[1]}));
  CHECK(victim.optimizer.parameter_name(more[0]) == "late.weight");
  CHECK(victim.optimizer.parameter_name(more[1]) == "2.0");
  CHECK(victim.optimizer.parameter_name(more[2]) == "unknown");
  CHECK(victim.optimizer.parameter_name(victim.parameters[0].detach()) == "unknown");
  CHECK(victim.optimizer.parameter_name(Tensor()) == "unknown");
  CHECK(options_of(victim.optimizer, 1).lr() == 0.5);
  CHECK(options_of(victim.optimizer, 0).amsgrad());

  FusedAdam grouped({NamedParamGroup(named), NamedParamGroup(Victim::with_names(victim.parameters))});
  CHECK(grouped.parameter_name(more[0]) == "late.weight");
  CHECK(grouped.parameter_name(victim.parameters[1]) == "encoder.bias");
  FusedAdam moved(std::move(grouped));
  CHECK(moved.parameter_name(more[0]) == "late.weight");
  FusedAdam unnamed({more[0], more[1]});
  CHECK(unnamed.parameter_name(more[1]) == "0.1");
}

}  // namespace
}  // namespace pacer::testing
