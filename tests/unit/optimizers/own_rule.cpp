// A rule that is not pacer's (Lion, of examples/own_optimizer) on pacer's machine: its values beside a
// restatement in LibTorch's operators, its state, and what is refused. The registry of optimizers runs the same
// rule through every edit between steps, every hook, ranks, shards and resume.
#include <cmath>

#include <pacer/collectives/agreement.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/kernels/cpu/element_loop.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/own_rule.h>

#include "own_optimizer/lion_rule.h"
#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/message_of.h"
#include "support/optimizers/late_page_device.h"
#include "support/optimizers/lion.h"

namespace pacer::testing {

namespace {

std::vector<Tensor> lion_parameters(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(3);
  const auto leaf = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, at::kDouble).to(dtype).requires_grad_();
  };
  return {leaf({40, 30}), leaf({7}), leaf({})};
}

// The same gradients for the same step, whoever asks.
void set_lion_gradients(const std::vector<Tensor>& parameters, int step) {
  torch::manual_seed(100 + step);
  for (const Tensor& p : parameters) {
    p.mutable_grad() = torch::randn(p.sizes(), at::kDouble).to(p.scalar_type());
  }
}

void take_lion_steps(Lion& optimizer, int first, int end) {
  for (int step = first; step < end; ++step) {
    set_lion_gradients(optimizer.param_groups()[0].params(), step);
    optimizer.step();
  }
}

// The loops of AdamW as a rule of one's own.
const kernels::UpdateLoops kAdamLoops{kernels::elements_cpu<kernels::AdamRule<false>>, nullptr};

OwnRuleOptions decaying_lion() { return lion_options(0.01).weight_decay(0.1); }

}  // namespace

TEST_CASE("a rule of one's own takes the steps of its paper", "[optimizers][own_rule]") {
  const std::vector<std::pair<at::ScalarType, double>> bounds = {{at::kDouble, 1e-14}, {at::kFloat, 1e-5}};
  for (const auto& [dtype, bound] : bounds) {
    const std::vector<Tensor> parameters = lion_parameters(dtype);
    std::vector<Tensor> p, m;
    for (const Tensor& parameter : parameters) {
      p.push_back(parameter.detach().to(at::kDouble).clone());
      m.push_back(torch::zeros_like(p.back()));
    }
    Lion optimizer(parameters, decaying_lion());
    for (int step = 0; step < 20; ++step) {
      set_lion_gradients(parameters, step);
      optimizer.step();
      for (size_t i = 0; i < p.size(); ++i) {
        const Tensor g = parameters[i].grad().to(at::kDouble);
        p[i] -= 0.01 * (torch::sign(0.9 * m[i] + 0.1 * g) + 0.1 * p[i]);
        m[i] = 0.99 * m[i] + 0.01 * g;
      }
    }
    for (size_t i = 0; i < p.size(); ++i) {
      CHECK((parameters[i].detach().to(at::kDouble) - p[i]).abs().max().item<double>() < bound);
      const auto& state =
          dynamic_cast<OwnRuleParamState&>(*optimizer.state().at(parameters[i].unsafeGetTensorImpl()));
      CHECK((state.exp_avg().to(at::kDouble) - m[i]).abs().max().item<double>() < bound);
      CHECK_FALSE(state.exp_avg_sq().defined());
      CHECK(state.step() == 20);
    }
  }
}

TEST_CASE("AdamW as a rule of one's own has the bits of FusedAdamW, whatever the options",
          "[optimizers][own_rule]") {
  const OwnRule rule("AdamW again", kAdamLoops, kernels::AdamRule<false>::kSecondMoment);
  for (const Mode& mode : all_modes()) {
    for (const bool corrects : {true, false}) {
      CAPTURE(mode.name, corrects);
      const auto set = [&](auto options) {
        options.betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).seed(7).bias_correction(corrects);
        return with_mode(options.finite_check(true), mode);
      };
      const std::vector<Tensor> own = lion_parameters(mode.dtype), fused = lion_parameters(mode.dtype);
      OwnRuleOptimizer one(own, set(OwnRuleOptions(rule, 0.01)));
      FusedAdamW other(fused, set(FusedAdamWOptions(0.01)));
      for (int step = 0; step < 5; ++step) {
        set_lion_gradients(own, step);
        set_lion_gradients(fused, step);
        one.step();
        other.step();
      }
      CHECK(same_bits(own, fused));
    }
  }
}

TEST_CASE("a rule of one's own without what a step needs is refused, and nothing is changed",
          "[optimizers][own_rule]") {
  const kernels::UpdateLoops nothing{nullptr, nullptr};
  const OwnRule empty("Empty", nothing, false), half("Half", kAdamLoops, /*has_second_moment=*/false);
  const std::vector<std::pair<const OwnRule*, const char*>> cases = {{&empty, "Empty: its rule has no loop"},
                                                                     {&half, "has_second_moment = true"}};
  for (const auto& [rule, words] : cases) {
    const std::vector<Tensor> parameters = lion_parameters();
    OwnRuleOptimizer optimizer(parameters, OwnRuleOptions(*rule, 0.01));
    set_lion_gradients(parameters, 0);
    const std::string refusal = message_of<InvalidArgument>([&] { optimizer.step(); });
    CHECK(refusal.find(words) != std::string::npos);
    CHECK(same_bits(parameters, lion_parameters()));
  }
}

TEST_CASE("a rule of one's own keeps master weights, and its remainder is as exact",
          "[optimizers][own_rule]") {
  std::vector<Tensor> values[2];
  const MasterWeights kinds[] = {MasterWeights::remainder, MasterWeights::fp32};
  for (int kind = 0; kind < 2; ++kind) {
    values[kind] = lion_parameters(at::kBFloat16);
    Lion optimizer(values[kind], decaying_lion().master_weights(kinds[kind]));
    take_lion_steps(optimizer, 0, 30);
  }
  for (size_t i = 0; i < values[0].size(); ++i) {
    // They round halves differently.
    const Tensor off = (values[0][i] - values[1][i]).detach().abs().to(at::kFloat);
    CHECK((off <= 0.0079 * values[1][i].detach().abs().to(at::kFloat)).all().item<bool>());
  }
}

TEST_CASE("a paged step of a rule of one's own has the bits of a plain one",
          "[optimizers][own_rule][paging]") {
  const std::vector<Tensor> plain = lion_parameters(), moved = lion_parameters();
  Lion one(plain, decaying_lion());
  PagedOnHost<Lion> other(moved, decaying_lion(), Paging().page_bytes(4096));
  take_lion_steps(one, 0, 5);
  take_lion_steps(other, 0, 5);
  for (size_t i = 0; i < plain.size(); ++i) CHECK(same_bits(plain[i].detach(), moved[i].detach()));
}

TEST_CASE("a state of a rule of one's own goes on by name and by archive, and only in its own rule",
          "[optimizers][own_rule]") {
  const std::vector<Tensor> whole = lion_parameters(), broken = lion_parameters();
  Lion unbroken(whole, decaying_lion()), before(broken, decaying_lion());
  take_lion_steps(unbroken, 0, 6);
  take_lion_steps(before, 0, 3);

  Lion after(broken, lion_options());  // options come from the archive
  load_from(after, saved(before));
  take_lion_steps(after, 3, 6);
  for (size_t i = 0; i < whole.size(); ++i) CHECK(same_bits(whole[i].detach(), broken[i].detach()));

  const NamedTensors state = after.export_state();
  CHECK(state.count("0.0/exp_avg") == 1);
  CHECK(state.count("0.0/exp_avg_sq") == 0);
  FusedAdamW adamw(lion_parameters());
  const std::string of_lion = saved(after);
  const std::string refusal = message_of<InvalidArgument>([&] { load_from(adamw, of_lion); });
  CHECK(refusal.find("saved by Lion") != std::string::npos);
}

TEST_CASE("options belong to one rule", "[optimizers][own_rule]") {
  const kernels::UpdateLoops loops{kernels::elements_cpu<LionRule>, nullptr};
  const OwnRule other("Other", loops, /*has_second_moment=*/false);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(lion_parameters(), std::make_unique<OwnRuleOptions>(other, 0.01));
  const std::string refusal = message_of<InvalidArgument>([&] { Lion optimizer(groups, lion_options()); });
  CHECK(refusal.find("belong to another optimizer") != std::string::npos);
  CHECK(message_of<InvalidArgument>([&] {
          Lion optimizer(lion_parameters(), lion_options(-1));
        }).find("Lion: lr must be") == 0);
  CHECK(OwnRuleOptions(lion_rule(), 0.01) == OwnRuleOptions(lion_rule(), 0.01));
  CHECK_FALSE(OwnRuleOptions(lion_rule(), 0.01) == OwnRuleOptions(other, 0.01));
  // What ranks compare, which have one class for all rules.
  const auto rule_of = [](const OwnRuleOptimizer& optimizer) {
    std::string rule;
    for (const Fact& fact : pacer::detail::optimizer_facts(optimizer)) {
      if (fact.what == "update rule") rule += fact.value;
    }
    return rule;
  };
  CHECK(rule_of(Lion(lion_parameters(), lion_options())) == "Lion");
  CHECK(rule_of(OwnRuleOptimizer(lion_parameters(), OwnRuleOptions(other, 0.01))) == "Other");
}

TEST_CASE("a step of a rule of one's own that is not finite changes nothing", "[optimizers][own_rule]") {
  const std::vector<Tensor> parameters = lion_parameters();
  Lion optimizer(parameters, decaying_lion().finite_check(true));
  take_lion_steps(optimizer, 0, 2);
  const Tensor before = parameters[0].detach().clone();
  set_lion_gradients(parameters, 2);
  parameters[1].mutable_grad()[3] = std::nan("");
  optimizer.step();
  CHECK(same_bits(before, parameters[0].detach()));
  CHECK(optimizer.skipped_steps() == 1);
}

}  // namespace pacer::testing
