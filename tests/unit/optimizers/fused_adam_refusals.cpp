// What FusedAdam and FusedAdamW refuse. Every refusal is an InvalidArgument that says where and what, and
// comes before anything has changed: values, gradients, moments, step counts, options.
#include "support/catch.h"

#include "support/collectives/victim.h"

namespace pacer::testing {
namespace {

struct BadGradient {
  const char* name;
  Tensor (*make)(const Tensor& parameter);
  std::vector<std::string> parts;
};

TEST_CASE("a gradient that does not fit is refused by the parameter's name", "[fused_adam]") {
  const std::vector<BadGradient> bad = {
      {"sparse", [](const Tensor& p) { return torch::ones(p.sizes()).to_sparse(); }, {"sparse"}},
      {"sparse rows",
       [](const Tensor&) {
         return torch::ones({3, 4}).to_sparse_csr();
       },
       {"parse"}},
      {"fp64", [](const Tensor& p) { return torch::ones(p.sizes(), at::kDouble); }, {"dtype"}},
      {"bf16", [](const Tensor& p) { return torch::ones(p.sizes(), at::kBFloat16); }, {"dtype"}},
      {"integer", [](const Tensor& p) { return torch::ones(p.sizes(), at::kLong); }, {"dtype"}},
      {"complex", [](const Tensor& p) { return torch::ones(p.sizes(), at::kComplexFloat); }, {"dtype"}},
      {"longer", [](const Tensor& p) { return torch::ones({p.size(0) + 1}); }, {"shape"}},
      {"flattened",
       [](const Tensor& p) {
         return torch::ones({p.numel() / 2, 2});
       },
       {"shape"}},
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
  CHECK(unless_refused(optimizer, {"parameter 1 of group 0 (shape ["}, [&] { optimizer.step(); }) == "");
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
      {"sparse", [] { return torch::ones({3}).to_sparse(); }, {"parse"}},
      {"meta", [] { return torch::empty({3}, at::kMeta); }, {"meta"}},
      {"expanded", [] { return torch::zeros({1}).expand({3}); }, {}},
      {"expanded rows",
       [] {
         return torch::zeros({3, 1}).expand({3, 4});
       },
       {}},
      {"overlapping rows",
       [] {
         return torch::zeros({6}).as_strided({3, 3}, {1, 1});
       },
       {}},
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
    for (const auto& part : parts("parameter 1 of group 0")) CHECK(contains(constructed, part));
    if (tensor.defined()) tensor.mutable_grad() = Tensor();

    const auto alone = refusal([&] { FusedAdamW({tensor}); });
    for (const auto& part : parts("parameter 0 of group 0")) CHECK(contains(alone, part));

    CHECK(unless_refused(victim.optimizer, parts("parameter 1 of group 1"), [&] {
            victim.optimizer.add_param_group(
                torch::optim::OptimizerParamGroup({random_parameters({{2}}, at::kFloat)[0], tensor}));
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
    CHECK(victim.unless_step_refused(parts("parameter 3 of group 0")) == "");
    victim.optimizer.param_groups()[0].params().pop_back();
    CHECK(victim.recovers());
  }
}

TEST_CASE("a tensor given twice is refused, however it comes in", "[fused_adam]") {
  Victim victim;
  const Tensor weight = victim.parameters[0];
  const auto other = random_parameters({{2}}, at::kFloat);
  CHECK(contains(refusal([&] { FusedAdam({other[0], weight, weight}); }), "as number 2 of group 0"));
  CHECK(contains(refusal([&] {
                   FusedAdam({torch::optim::OptimizerParamGroup({weight}),
                              torch::optim::OptimizerParamGroup({other[0], weight})});
                 }),
                 "as number 1 of group 1"));
  NamedParameters tied;
  tied.insert("wte.weight", weight);
  tied.insert("lm_head.weight", weight);
  const std::string message = refusal([&] { FusedAdam{tied}; });
  CHECK(contains(message, "wte.weight"));
  CHECK(contains(message, "twice"));

  CHECK(unless_refused(victim.optimizer, {"encoder.weight", "twice"}, [&] {
          victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({weight}));
        }) == "");
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
    const std::string result =
        unless_refused(optimizer, {"0 of group 0", "1 of group 0"}, [&] { optimizer.step(); });
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

TEST_CASE("a gradient may share memory with another gradient, but not with a parameter", "[fused_adam]") {
  const Tensor gradients = torch::randn({10});
  for (const bool inside_parameter : {false, true}) {
    CAPTURE(inside_parameter);
    const auto parameters = random_parameters({{8}, {6}}, at::kFloat);
    FusedAdamW optimizer(parameters);
    parameters[0].mutable_grad() = gradients.slice(0, 0, 8);
    parameters[1].mutable_grad() =
        inside_parameter ? parameters[0].detach().slice(0, 2) : gradients.slice(0, 4);
    CHECK(unless_refused(optimizer, {"0 of group 0", "1 of group 0"}, [&] { optimizer.step(); }) ==
          (inside_parameter ? "" : "<no exception>"));
  }
}

TEST_CASE("a parameter that is no leaf is refused in a sentence", "[fused_adam]") {
  Victim victim;
  const auto leaf = random_parameters({{3}}, at::kFloat);
  const auto before = snapshot(victim.optimizer);
  CHECK(
      contains(refusal([&] { FusedAdamW({leaf[0] * 2}); }), "parameter 0 of group 0 (shape [3]) is no leaf"));
  CHECK(contains(
      refusal([&] { victim.optimizer.add_param_group(torch::optim::OptimizerParamGroup({leaf[0] * 2})); }),
      "parameter 0 of group 1 (shape [3]) is no leaf"));
  CHECK(difference(before, snapshot(victim.optimizer)) == "");
}

TEST_CASE("a message speaks of a parameter by its name, or by its place, shape and the way to names",
          "[fused_adam]") {
  const auto parameters = random_parameters({{4, 3}, {2}}, at::kFloat);
  const auto said_of = [&](FusedAdamW& optimizer) {
    set_random_gradients(parameters);
    parameters[1].mutable_grad() = parameters[1].grad().to_sparse();
    const std::string message = refusal([&] { optimizer.step(); });
    parameters[1].mutable_grad() = Tensor();
    return message;
  };
  FusedAdamW unnamed(parameters);
  CHECK(
      contains(said_of(unnamed),
               "the gradient of parameter 1 of group 0 (shape [2]; make the optimizer of named_parameters() "
               "to see names) is Sparse"));
  NamedParameters named;
  named.insert("encoder.0.weight", parameters[0]);
  named.insert("encoder.1", parameters[1]);
  FusedAdamW with_names(named);
  CHECK(contains(said_of(with_names), "the gradient of parameter encoder.1 is Sparse"));
  unnamed.name_parameters(named);  // as a Session does
  CHECK(contains(said_of(unnamed), "the gradient of parameter encoder.1 is Sparse"));
}

}  // namespace
}  // namespace pacer::testing
