// Schedule-Free AdamW as an optimizer: its values beside those of the package schedulefree 1.4.1
// (schedule_free_values.py prints them), what the model holds in evaluation, its state, and what is refused. The
// registry of optimizers runs it through every edit between steps, every hook, ranks and resume.
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/schedule_free.h>

#include "support/catch.h"
#include "support/checkpoints/archives.h"
#include "support/message_of.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/late_page_device.h"
#include "support/optimizers/schedule_free.h"

namespace pacer::testing::schedule_free {
namespace {

using FreeOptions = ScheduleFreeAdamWOptions;

FreeOptions free_options() { return FreeOptions(0.01).weight_decay(0.1).warmup_steps(3).r(0.5); }

std::vector<Tensor> free_parameters(at::ScalarType dtype = at::kFloat) {
  torch::manual_seed(3);
  const auto leaf = [&](at::IntArrayRef sizes) {
    return torch::randn(sizes, at::kDouble).to(dtype).requires_grad_();
  };
  return {leaf({40, 30}), leaf({7}), leaf({})};
}

// The same gradients for the same step, whoever asks.
void take_free_steps(ScheduleFreeAdamW& optimizer, int first, int end) {
  for (int step = first; step < end; ++step) {
    torch::manual_seed(100 + step);
    for (const auto& group : optimizer.param_groups()) {
      for (const Tensor& p : group.params()) {
        p.mutable_grad() = torch::randn(p.sizes(), at::kDouble).to(p.scalar_type());
      }
    }
    optimizer.step();
  }
}

std::vector<Tensor> copies(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copied;
  for (const Tensor& tensor : tensors) copied.push_back(tensor.detach().clone());
  return copied;
}
bool all_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  bool equal = a.size() == b.size();
  for (size_t i = 0; equal && i < a.size(); ++i) equal = same_bits(a[i].detach(), b[i].detach());
  return equal;
}

// All that files hold.
NamedTensors snapshot(const ScheduleFreeAdamW& optimizer) {
  NamedTensors copy;
  for (const auto& [name, tensor] : optimizer.export_state()) copy[name] = tensor.clone();
  return copy;
}
bool same_state(const NamedTensors& a, const NamedTensors& b) {
  bool equal = a.size() == b.size();
  for (const auto& [name, tensor] : a) equal = equal && b.count(name) == 1 && same_bits(tensor, b.at(name));
  return equal;
}

struct KnownAnswer {
  std::array<double, 4> y, z, x;
  double weight_sum, lr_max;
};
const std::array<KnownAnswer, 3> kKnown = {{
    {{0.4097532871859355, -1.0071137906687746, 1.6369240766109554, -0.10107607726894566},
     {0.3396817605429246, -0.8379267714652336, 1.3718781568591647, -0.07150934906345519},
     {0.4197635052777942, -1.031283364840709, 1.6747877794326398, -0.10529989558401573},
     0.07481697082519531,
     0.0234375},
    {{1.5023061177086607, -1.2467304215619341, 2.0016381763566096, -0.12213432909280923},
     {1.5007873945495778, -1.2439102427677164, 1.9960576005377875, -0.12556971271938006},
     {1.5025230781599583, -1.2471333042468224, 2.0024354014735843, -0.12164356000329911},
     6.764517493336268,
     0.0078125},
    {{2.50549992000947, -1.24261033435837, 2.003921524097878, -0.12398272511859398},
     {2.5243911554622223, -1.2240147371597099, 1.9968824120428033, -0.13520011807249518},
     {2.502801172087648, -1.2452668482438929, 2.0049271115343172, -0.1223802404108938},
     0.021282958984375,
     0.015625},
}};

double distance_to(const std::array<double, 4>& known, const Tensor& found) {
  double largest = 0;
  for (int64_t k = 0; k < 4; ++k) {
    const double off = std::abs(found[k].item<double>() - known[static_cast<size_t>(k)]);
    largest = std::isfinite(off) ? std::max(largest, off) : HUGE_VAL;
  }
  return largest;
}

}  // namespace

TEST_CASE("groups of Schedule-Free AdamW, one of which joins later, end where those of schedulefree do",
          "[optimizers][schedule-free]") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    const double bound = dtype == at::kDouble ? 2e-14 : 2e-5;
    std::vector<Tensor> weights;
    for (int n = 0; n < 3; ++n) {
      const std::vector<double> start = {0.5 + n, -1.25, 2.0, -0.125};
      weights.push_back(torch::tensor(start, dtype).requires_grad_());
    }
    const FreeOptions shared = FreeOptions(0x1p-6).betas({0.875, 0.96875}).eps(0x1p-20).warmup_steps(20);
    using Group = torch::optim::OptimizerParamGroup;
    ScheduleFreeAdamW optimizer(
        {Group({weights[0]}, std::make_unique<FreeOptions>(FreeOptions(shared).weight_decay(0.125))),
         Group({weights[1]}, std::make_unique<FreeOptions>(FreeOptions(shared).lr(0x1p-7).r(1.5)))},
        shared);
    for (int64_t t = 0; t < 150; ++t) {
      if (t == 50) optimizer.add_param_group(Group({weights[2]}));
      optimizer.param_groups()[0].options().set_lr(0x1p-6 * (1 + static_cast<double>(t % 3) / 4));
      for (int64_t n = 0; n < 3; ++n) {
        std::vector<double> gradient;
        for (int64_t i = 0; i < 4; ++i)
          gradient.push_back(static_cast<double>((t * 7 + i * 3 + n) % 11 - 5) / 8);
        weights[static_cast<size_t>(n)].mutable_grad() = torch::tensor(gradient, dtype);
      }
      optimizer.step();
    }
    for (size_t n = 0; n < 3; ++n) {
      CAPTURE(dtype, n);
      const auto& state = state_of(optimizer, weights[n]);
      CHECK(distance_to(kKnown[n].y, weights[n].detach()) < bound);
      CHECK(distance_to(kKnown[n].z, state.exp_avg()) < bound);
      CHECK(std::abs(state.average().weight_sum / kKnown[n].weight_sum - 1) < 1e-14);
      CHECK(state.average().lr_max == kKnown[n].lr_max);
      CHECK(state.step() == (n == 2 ? 100 : 150));
    }
    optimizer.eval();
    for (size_t n = 0; n < 3; ++n) CHECK(distance_to(kKnown[n].x, weights[n].detach()) < 2 * bound);
  }
}

TEST_CASE("a training that is evaluated has the bits of one that is not", "[optimizers][schedule-free]") {
  struct Kind {
    at::ScalarType dtype;
    MasterWeights master_weights;
    Rounding rounding;
  };
  const std::vector<Kind> kinds = {
      {at::kDouble, MasterWeights::automatic, Rounding::nearest},
      {at::kFloat, MasterWeights::automatic, Rounding::nearest},
      {at::kHalf, MasterWeights::automatic, Rounding::nearest},
      {at::kBFloat16, MasterWeights::remainder, Rounding::nearest},
      {at::kBFloat16, MasterWeights::remainder_8, Rounding::nearest},
      {at::kBFloat16, MasterWeights::fp32, Rounding::nearest},
      {at::kBFloat16, MasterWeights::none, Rounding::nearest},
      {at::kBFloat16, MasterWeights::none, Rounding::stochastic},
  };
  for (const Kind& kind : kinds) {
    CAPTURE(kind.dtype, static_cast<int>(kind.master_weights), static_cast<int>(kind.rounding));
    const FreeOptions options = free_options().master_weights(kind.master_weights).rounding(kind.rounding);
    const std::vector<Tensor> plain = free_parameters(kind.dtype), measured = free_parameters(kind.dtype);
    ScheduleFreeAdamW one(plain, options), other(measured, options);
    other.eval();  // before the first step both are the same weights
    CHECK(all_equal(plain, measured));
    other.train();
    for (int step = 0; step < 6; ++step) {
      take_free_steps(one, step, step + 1);
      take_free_steps(other, step, step + 1);
      const std::vector<Tensor> trained = copies(measured);
      other.eval();
      CHECK_FALSE(other.is_training());
      if (step > 0) CHECK_FALSE(same_bits(measured[0].detach(), trained[0]));
      other.eval();  // does nothing more
      other.train();
      other.train();
      CHECK(other.is_training());
      CHECK(all_equal(measured, trained));
    }
    CHECK(all_equal(plain, measured));
    CHECK(same_state(one.export_state(), other.export_state()));
  }
}

TEST_CASE("evaluations lie one inside the other, and inside eval()", "[optimizers][schedule-free]") {
  const std::vector<Tensor> parameters = free_parameters();
  ScheduleFreeAdamW optimizer(parameters, free_options());
  take_free_steps(optimizer, 0, 4);
  const std::vector<Tensor> y = copies(parameters);
  optimizer.eval();
  const std::vector<Tensor> x = copies(parameters);
  optimizer.evaluation_begin();
  CHECK(all_equal(parameters, x));
  optimizer.train();  // asked for inside: the evaluation holds x until its end
  CHECK(all_equal(parameters, x));
  optimizer.evaluation_begin();
  optimizer.evaluation_end();
  CHECK(all_equal(parameters, x));
  optimizer.evaluation_end();
  CHECK(all_equal(parameters, y));
  optimizer.evaluation_begin();
  optimizer.eval();
  optimizer.evaluation_end();
  CHECK(all_equal(parameters, x));
  optimizer.train();
  CHECK(all_equal(parameters, y));
}

TEST_CASE(
    "what is evaluated follows from all digits of 16-bit parameters, and from what others wrote into them",
    "[optimizers][schedule-free]") {
  for (const MasterWeights master_weights : {MasterWeights::fp32, MasterWeights::remainder}) {
    const std::vector<Tensor> parameters = free_parameters(at::kBFloat16), fp32 = free_parameters();
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < fp32.size(); ++i) fp32[i].copy_(parameters[i]);
    }
    const FreeOptions options = free_options().betas({0.5, 0.99});
    ScheduleFreeAdamW optimizer(parameters, FreeOptions(options).master_weights(master_weights));
    ScheduleFreeAdamW twin(fp32, options);
    for (int step = 0; step < 20; ++step) {
      torch::manual_seed(step);
      for (size_t i = 0; i < fp32.size(); ++i) {
        parameters[i].mutable_grad() = torch::randn(fp32[i].sizes()).to(at::kBFloat16);
        fp32[i].mutable_grad() = parameters[i].grad().to(at::kFloat);
      }
      optimizer.step();
      twin.step();
    }
    optimizer.eval();
    twin.eval();
    for (size_t i = 0; i < fp32.size(); ++i) {
      CHECK(same_bits(parameters[i].detach(), fp32[i].detach().to(at::kBFloat16)));
    }
    optimizer.train();
    parameters[0].data().zero_();
    optimizer.eval();
    // 0 + (1 - 1 / 0.5) (z - 0)
    const Tensor x = -state_of(optimizer, parameters[0]).exp_avg();
    CHECK(same_bits(parameters[0].detach(), x.to(at::kBFloat16)));
  }
}

TEST_CASE("while the parameters hold the average nothing steps, and no file is written or read",
          "[optimizers][schedule-free]") {
  const std::vector<Tensor> parameters = free_parameters();
  ScheduleFreeAdamW optimizer(parameters, free_options());
  take_free_steps(optimizer, 0, 3);
  const NamedTensors state = snapshot(optimizer);
  const std::string archive = saved(optimizer);
  const std::vector<Tensor> y = copies(parameters);
  optimizer.eval();
  const std::vector<Tensor> x = copies(parameters);
  bool was_called = false;
  const std::vector<std::pair<std::string, std::function<void()>>> refused = {
      {"step",
       [&] {
         optimizer.step([&] {
           was_called = true;
           return Tensor();
         });
       }},
      {"step", [&] { contract(optimizer).prepare({}); }},
      {"save", [&] { saved(optimizer); }},
      {"load", [&] { load_from(optimizer, archive); }},
      {"export_state", [&] { (void)optimizer.export_state(); }},
      {"import_state", [&] { optimizer.import_state(state); }},
  };
  for (const auto& [what, call] : refused) {
    CHECK(message_of<InvalidArgument>(call) ==
          "ScheduleFreeAdamW: " + what +
              " belongs to the weights of training, but the parameters hold their average now; call train() "
              "first, or end the evaluation of the Session");
  }
  CHECK_FALSE(was_called);
  CHECK(all_equal(parameters, x));
  optimizer.train();
  CHECK(all_equal(parameters, y));
  CHECK(same_state(optimizer.export_state(), state));
}

TEST_CASE("steps that are skipped or sat out do not count in the average", "[optimizers][schedule-free]") {
  const std::vector<Tensor> parameters = free_parameters(), calm = free_parameters();
  ScheduleFreeAdamW optimizer(parameters, free_options().finite_check(true));
  ScheduleFreeAdamW without(calm, free_options().finite_check(true));
  take_free_steps(optimizer, 0, 3);
  take_free_steps(without, 0, 3);
  const NamedTensors before = snapshot(optimizer);
  parameters[1].mutable_grad().fill_(std::nan(""));
  optimizer.step();
  CHECK(optimizer.skipped_steps() == 1);
  CHECK(same_state(optimizer.export_state(), before));
  take_free_steps(optimizer, 3, 5);
  take_free_steps(without, 3, 5);
  CHECK(all_equal(parameters, calm));

  // One that sits out has weights of its own from there on.
  parameters[1].mutable_grad() = Tensor();
  const auto its = state_of(optimizer, parameters[1]).average();
  optimizer.step();
  take_free_steps(optimizer, 5, 6);
  CHECK(state_of(optimizer, parameters[1]).step() == 6);
  CHECK(state_of(optimizer, parameters[0]).step() == 7);
  const double lr = 0.01, sixth = std::sqrt(6.0) * lr * lr, seventh = std::sqrt(7.0) * lr * lr;
  CHECK(std::abs(state_of(optimizer, parameters[1]).average().weight_sum - (its.weight_sum + sixth)) < 1e-15);
  CHECK(std::abs(state_of(optimizer, parameters[0]).average().weight_sum -
                 (its.weight_sum + sixth + seventh)) < 1e-15);
}

TEST_CASE("Schedule-Free AdamW goes on to the bit from an archive, from state by name, and by hand",
          "[optimizers][schedule-free]") {
  for (const int how : {0, 1, 2}) {
    CAPTURE(how);
    const std::vector<Tensor> whole = free_parameters(), broken = free_parameters();
    ScheduleFreeAdamW unbroken(whole, free_options()), before(broken, free_options());
    take_free_steps(unbroken, 0, 6);
    take_free_steps(before, 0, 3);
    ScheduleFreeAdamW after(broken);  // options come from the file
    if (how == 0) load_from(after, saved(before));
    if (how == 1) after.import_state(before.export_state());
    if (how == 2) {
      after.param_groups()[0].set_options(std::make_unique<FreeOptions>(free_options()));
      for (const Tensor& parameter : broken) {
        auto state = std::make_unique<ScheduleFreeAdamWParamState>();
        const auto& its = state_of(before, parameter);
        state->exp_avg(its.exp_avg()).exp_avg_sq(its.exp_avg_sq());
        state->step(its.step()).average(its.average());
        after.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
      }
    }
    take_free_steps(after, 3, 6);
    CHECK(all_equal(whole, broken));
    CHECK(same_state(after.export_state(), unbroken.export_state()));
  }
}

TEST_CASE("a state without what its average has taken in is refused", "[optimizers][schedule-free]") {
  const std::vector<Tensor> parameters = free_parameters();
  ScheduleFreeAdamW optimizer(parameters, free_options());
  take_free_steps(optimizer, 0, 2);
  const NamedTensors state = snapshot(optimizer);
  CHECK(require_number<double>(state, "0.0/weight_sum") > 0);
  const auto load = [&](const char* name, double value) {
    NamedTensors changed = state;
    changed.erase(name);
    if (value != 0) changed[name] = number_tensor(value);
    return message_of<InvalidArgument>([&] { optimizer.import_state(changed); });
  };
  CHECK(contains(load("0.1/weight_sum", 0), "0.1/weight_sum"));
  CHECK(contains(load("0.2/lr_max", 0), "0.2/lr_max"));
  CHECK(load("0.1/weight_sum", -1) ==
        "parameter 0.1 of the state to load has weight_sum -1, which must be a finite number >= 0");
  CHECK(contains(load("0.0/lr_max", HUGE_VAL), "lr_max inf"));
  CHECK(same_state(optimizer.export_state(), state));
}

TEST_CASE("states of other optimizers are refused, because their exp_avg is no z",
          "[optimizers][schedule-free]") {
  const std::vector<Tensor> parameters = free_parameters();
  for (const Tensor& p : parameters) p.mutable_grad() = torch::ones_like(p);
  ScheduleFreeAdamW optimizer(parameters, free_options());
  torch::optim::AdamW of_torch(parameters, torch::optim::AdamWOptions(0.01));
  FusedAdamW fused(parameters);
  of_torch.step();
  fused.step();
  CHECK(contains(message_of<InvalidArgument>([&] { load_from(optimizer, saved(of_torch)); }),
                 "the archive was saved by another optimizer than ScheduleFreeAdamW, whose exp_avg is a "
                 "momentum and no z"));
  CHECK(contains(message_of<InvalidArgument>([&] { load_from(optimizer, saved(fused)); }),
                 "was saved by FusedAdamW, but this is ScheduleFreeAdamW"));
  CHECK(contains(message_of<InvalidArgument>([&] { optimizer.import_state(fused.export_state()); }),
                 "was saved by FusedAdamW, but this is ScheduleFreeAdamW"));
  CHECK(contains(message_of<InvalidArgument>([&] { load_from(fused, saved(optimizer)); }),
                 "was saved by ScheduleFreeAdamW, but this is FusedAdamW"));
  const Tensor& first = parameters[0];
  optimizer.state()[first.unsafeGetTensorImpl()] = of_torch.state().at(first.unsafeGetTensorImpl())->clone();
  const std::vector<Tensor> before = copies(parameters);
  CHECK(contains(message_of<InvalidArgument>([&] { optimizer.step(); }),
                 "a state of torch's Adam or AdamW was put among its states"));
  CHECK(all_equal(parameters, before));
  optimizer.state().erase(first.unsafeGetTensorImpl());
  optimizer.step();
}

TEST_CASE("options of Schedule-Free AdamW out of range are refused in a sentence",
          "[optimizers][schedule-free]") {
  const auto refusal = [](const FreeOptions& options) {
    return message_of<InvalidArgument>([&] { ScheduleFreeAdamW(free_parameters(), options); });
  };
  CHECK(contains(refusal(FreeOptions().betas({0, 0.9})), "ScheduleFreeAdamW: the first beta must be > 0"));
  CHECK(refusal(FreeOptions().warmup_steps(-1)) == "ScheduleFreeAdamW: warmup_steps must be >= 0, not -1");
  CHECK(refusal(FreeOptions().r(16.5)) == "ScheduleFreeAdamW: r must be in [0, 16], not 16.5");
  CHECK(refusal(FreeOptions().weight_lr_power(-0.5)) ==
        "ScheduleFreeAdamW: weight_lr_power must be in [0, 16], not -0.5");
  CHECK(contains(refusal(FreeOptions().r(std::nan(""))), "r must be in [0, 16]"));
  CHECK(refusal(FreeOptions().state_bits(8)) ==
        "ScheduleFreeAdamW: its rule has no state in 8 bits; leave state_bits at 32");
  ScheduleFreeAdamW optimizer(free_parameters());
  auto& options = optimizer.param_groups()[0].options();
  static_cast<torch::optim::AdamWOptions&>(options).amsgrad(true);
  CHECK(contains(message_of<InvalidArgument>([&] { take_free_steps(optimizer, 0, 1); }),
                 "amsgrad was set, which this optimizer does not have"));
  CHECK(contains(contract(optimizer).unshared_reason(GradientScope::world), "their averages"));
}

TEST_CASE("pages of z have the bits of plain ones, also in evaluation",
          "[optimizers][schedule-free][paging]") {
  const std::vector<Tensor> plain = free_parameters(), moved = free_parameters();
  ScheduleFreeAdamW one(plain, free_options());
  PagedOnHost<ScheduleFreeAdamW> other(moved, free_options(), Paging().page_bytes(4096));
  for (int round = 0; round < 2; ++round) {
    take_free_steps(one, 3 * round, 3 * round + 3);
    take_free_steps(other, 3 * round, 3 * round + 3);
    CHECK(all_equal(plain, moved));
    one.eval();
    other.eval();
    CHECK(all_equal(plain, moved));
    one.train();
    other.train();
  }
  CHECK(all_equal(plain, moved));
}

}  // namespace pacer::testing::schedule_free
