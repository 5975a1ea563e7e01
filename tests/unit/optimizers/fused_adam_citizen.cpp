// FusedAdam and FusedAdamW as citizens of LibTorch: one program that uses everything torch::optim offers,
// compiled for torch's optimizers and for ours, must log the same numbers.
#include "support/catch.h"
#include "support/heard_warnings.h"

#include <sstream>

#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/serialize.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

torch::nn::Sequential small_model(at::ScalarType dtype) {
  torch::nn::Sequential model(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  model->to(dtype);
  return model;
}

// All that a program can observe, number by number.
class Log {
 public:
  void operator()(const Tensor& tensor) {
    for (const double value : to_doubles(tensor)) entries_.push_back(value);
  }
  void operator()(double value) { entries_.push_back(value); }
  const std::vector<double>& entries() const { return entries_; }

 private:
  std::vector<double> entries_;
};

// The text below knows only the three names a user would replace.
template <class Adam, class AdamOptions, class AdamParamState>
std::vector<double> everything_torch_offers() {
  using torch::optim::OptimizerParamGroup;
  std::string unread;  // size() and others warn of their removal, since version 1.6
  HeardWarnings ear(unread);
  const c10::WarningUtils::WarningHandlerGuard guard(&ear);
  Log log;
  torch::manual_seed(11);
  auto model = small_model(torch::kFloat64);
  const Tensor input = torch::randn({16, 4}, torch::kFloat64), target = input.sum(1, true).sin();
  Tensor gain = torch::ones({}, torch::kFloat64).requires_grad_();
  Tensor offset = torch::zeros({1, 1}, torch::kFloat64).requires_grad_();
  const auto loss_of = [&] { return torch::mse_loss(model->forward(input) * gain + offset, target); };
  const auto train = [&](Adam& optimizer, int steps) {
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      auto loss = loss_of();
      loss.backward();
      optimizer.step();
      log(loss);
    }
  };

  {  // Constructors.
    Adam by_list(model->parameters());
    train(by_list, 2);
    Adam by_rate(model->parameters(), 1e-2);
    train(by_rate, 2);
    Adam by_braces({gain, offset},
                   AdamOptions(1e-2).betas({0.8, 0.99}).eps(1e-9).weight_decay(1e-3).amsgrad(true));
    train(by_braces, 2);
    Adam by_default_options({gain, offset}, {});
    train(by_default_options, 1);
    auto heap = std::make_unique<Adam>(model->parameters(), AdamOptions().lr(2e-2));
    train(*heap, 2);
    Adam moved(std::move(*heap));
    train(moved, 2);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>{gain});
    groups.emplace_back(std::vector<Tensor>{offset},
                        std::make_unique<AdamOptions>(AdamOptions(0.05).amsgrad(true)));
    Adam by_groups(groups, AdamOptions(0.5).weight_decay(0.1));
    train(by_groups, 3);
    log(by_groups.size());
    Adam braced_groups({OptimizerParamGroup({gain}), OptimizerParamGroup({offset})}, AdamOptions(0.01));
    train(braced_groups, 2);
  }

  Adam optimizer(model->parameters(), AdamOptions(1e-2).weight_decay(0.01));
  log(optimizer.size());
  log(optimizer.parameters().size());
  optimizer.add_param_group(OptimizerParamGroup({gain}));
  optimizer.add_param_group(
      OptimizerParamGroup({offset}, std::make_unique<AdamOptions>(AdamOptions(0.1).betas({0.5, 0.6}))));
  log(optimizer.param_groups().size());
  log(static_cast<AdamOptions&>(optimizer.param_groups()[1].options()).weight_decay());
  log(static_cast<AdamOptions&>(optimizer.defaults()).lr());
  train(optimizer, 3);

  {  // Options changed in flight, through both interfaces.
    for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
    static_cast<AdamOptions&>(optimizer.param_groups()[0].options()).eps(1e-3).weight_decay(0);
    std::get<0>(static_cast<AdamOptions&>(optimizer.param_groups()[1].options()).betas()) = 0.7;
    train(optimizer, 3);
    for (const auto& group : optimizer.param_groups()) log(group.options().get_lr());
    log(AdamOptions(1e-3) == AdamOptions(1e-3));
    log(AdamOptions(1e-3) == AdamOptions(1e-3).eps(1e-5));
  }

  {  // zero_grad in both forms, and a parameter that sits steps out.
    optimizer.zero_grad(/*set_to_none=*/false);
    for (const auto& parameter : optimizer.parameters()) log(parameter.grad().abs().sum());
    optimizer.step();
    log(gain);
    optimizer.zero_grad();
    log(gain.grad().defined());
    optimizer.step();
    torch::mse_loss(model->forward(input), target).backward();
    optimizer.step();
    log(static_cast<AdamParamState&>(*optimizer.state().at(gain.unsafeGetTensorImpl())).step());
    log(gain);
  }

  {  // Closures.
    torch::NoGradGuard outer;
    int calls = 0;
    const auto closure = [&] {
      ++calls;
      log(torch::GradMode::is_enabled());
      optimizer.zero_grad();
      auto loss = loss_of();
      loss.backward();
      return loss;
    };
    for (int i = 0; i < 3; ++i) log(optimizer.step(closure));
    log(calls);
    log(torch::GradMode::is_enabled());
    log(optimizer.step().defined());
    torch::optim::Optimizer& base = optimizer;
    log(base.step(closure));
  }

  {  // State, read, written, erased.
    for (const auto& parameter : optimizer.parameters()) {
      auto& state = static_cast<AdamParamState&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
      log(state.step());
      log(state.exp_avg());
      log(state.exp_avg_sq());
      log(state.max_exp_avg_sq().defined());
      state.step(100)
          .exp_avg(torch::full_like(parameter, 0.01))
          .exp_avg_sq(torch::full_like(parameter, 0.02));
    }
    train(optimizer, 2);
    static_cast<AdamParamState&>(*optimizer.state().at(gain.unsafeGetTensorImpl())).exp_avg().zero_();
    optimizer.state().erase(offset.unsafeGetTensorImpl());
    train(optimizer, 2);
    const auto copy = optimizer.state().at(offset.unsafeGetTensorImpl())->clone();
    train(optimizer, 1);
    log(static_cast<AdamParamState&>(*copy).step());
    auto fresh = std::make_unique<AdamParamState>();
    fresh->step(7);
    fresh->exp_avg(torch::ones_like(offset)).exp_avg_sq(torch::ones_like(offset));
    optimizer.state()[offset.unsafeGetTensorImpl()] = std::move(fresh);
    train(optimizer, 2);
    optimizer.state().clear();
    train(optimizer, 2);
    log(optimizer.state().size());
  }

  {  // Schedulers.
    torch::optim::StepLR schedule(optimizer, 2, 0.5);
    for (int i = 0; i < 5; ++i) {
      train(optimizer, 1);
      schedule.step();
      for (const auto& group : optimizer.param_groups()) log(group.options().get_lr());
    }
    torch::optim::ReduceLROnPlateauScheduler plateau(optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                     0.5, 1);
    for (int i = 0; i < 6; ++i) {
      train(optimizer, 1);
      plateau.step(1.0F);
      for (const auto& group : optimizer.param_groups()) log(group.options().get_lr());
    }
  }

  {  // Saved, and loaded into a fresh optimizer, which goes on alone.
    std::stringstream file;
    torch::save(optimizer, file);
    Adam restored(model->parameters(), AdamOptions(0.9));
    restored.add_param_group(OptimizerParamGroup({gain}));
    restored.add_param_group(OptimizerParamGroup({offset}));
    torch::load(restored, file);
    log(restored.param_groups()[2].options().get_lr());
    train(restored, 3);
    Adam assigned({gain});
    assigned = std::move(restored);
    train(assigned, 2);
  }

  {  // The deprecated way to add parameters, and by hand.
    Tensor late = torch::ones({2}, torch::kFloat64).requires_grad_(),
           later = torch::ones({3}, torch::kFloat64).requires_grad_();
    optimizer.add_parameters({late});
    optimizer.param_groups()[1].params().push_back(later);
    optimizer.zero_grad();
    (late.sum() * later.prod() * loss_of()).backward();
    optimizer.step();
    optimizer.step();
    log(late);
    log(later);
    log(optimizer.size());
    optimizer.param_groups().pop_back();
    optimizer.step();
    log(offset);
  }
  for (const auto& parameter : model->parameters()) log(parameter);
  return log.entries();
}

void check_same_log(const std::vector<double>& ours, const std::vector<double>& theirs) {
  REQUIRE(ours.size() == theirs.size());
  CHECK(theirs.size() > 250);
  size_t different = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    if (std::abs(ours[i] - theirs[i]) <= 1e-9 * std::max(1.0, std::abs(theirs[i]))) continue;
    if (++different > 3) continue;
    CAPTURE(i);
    CHECK(ours[i] == theirs[i]);
  }
  CHECK(different == 0);
}

TEST_CASE("a program written for torch's Adam behaves the same with FusedAdam", "[fused_adam]") {
  check_same_log(
      everything_torch_offers<FusedAdam, FusedAdamOptions, FusedAdamParamState>(),
      everything_torch_offers<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>());
}

TEST_CASE("a program written for torch's AdamW behaves the same with FusedAdamW", "[fused_adam]") {
  check_same_log(everything_torch_offers<FusedAdamW, FusedAdamWOptions, FusedAdamWParamState>(),
                 everything_torch_offers<torch::optim::AdamW, torch::optim::AdamWOptions,
                                         torch::optim::AdamWParamState>());
}

// The convergence test of LibTorch's own optimizers, with its thresholds.
template <class Optimizer>
bool learns_xor(OptionsOf<Optimizer> options, at::ScalarType dtype) {
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(2, 8), torch::nn::Functional(torch::sigmoid),
                              torch::nn::Linear(8, 1), torch::nn::Functional(torch::sigmoid));
  model->to(dtype);
  Optimizer optimizer(model->parameters(), options);
  double running_loss = 1;
  for (int epoch = 0; running_loss > 0.1; ++epoch) {
    if (epoch > 3000) return false;
    const Tensor inputs = torch::randint(2, {200, 2}, dtype);
    const Tensor labels = inputs.select(1, 0).ne(inputs.select(1, 1)).to(dtype).unsqueeze(1);
    const auto step = [&] {
      optimizer.zero_grad();
      auto loss = torch::binary_cross_entropy(model->forward(inputs), labels);
      loss.backward();
      return loss;
    };
    running_loss = running_loss * 0.99 + optimizer.step(step).template item<double>() * 0.01;
  }
  return true;
}

TEMPLATE_TEST_CASE("XOR is learnt", "[fused_adam]", FusedAdam, FusedAdamW) {
  using Options = OptionsOf<TestType>;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    CHECK(learns_xor<TestType>(Options(0.1), dtype));
    CHECK(learns_xor<TestType>(Options(0.1).weight_decay(1e-6).amsgrad(true), dtype));
  }
}

}  // namespace
}  // namespace pacer::testing
