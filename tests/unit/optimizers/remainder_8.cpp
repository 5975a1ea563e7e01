// MasterWeights::remainder_8: how far a training goes from one with fp32 masters, what becomes of a weight where its
// format changes, and what is refused. Its rounding is tested in kernels/weight_correction.cpp.
#include "support/catch.h"

#include <sstream>

#include <torch/serialize.h>

#include <pacer/kernels/math/weight_correction.h>
#include <pacer/optimizers/detail/remainder_values.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/schedule_free.h>

#include "support/kernels/correction_reference.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/state_8bit.h"

namespace pacer::testing {
namespace {

constexpr double kRounding = 0x1p-15;  // of a weight, at most

// The values that bf16 parameters and corrections stand for, restated, in fp64.
Tensor corrected_values(const Tensor& parameter, const Tensor& correction) {
  const Tensor p = parameter.detach().contiguous(), c = correction.contiguous();
  const Tensor values = at::empty(p.sizes(), at::kDouble);
  for (int64_t i = 0; i < p.numel(); ++i) {
    const auto bits = static_cast<uint16_t>(p.view(at::kShort).data_ptr<int16_t>()[i]);
    const double value = static_cast<float>(corrected(bits, c.data_ptr<int8_t>()[i]));
    values.data_ptr<double>()[i] = (bits & 0x7FFF) == 0 ? 0.0 : value;
  }
  return values;
}

// The values behind parameters, in whatever form the optimizer keeps them.
template <class Optimizer>
Tensor held_values(Optimizer& optimizer, const Tensor& parameter) {
  const auto& state =
      static_cast<const FusedAdamStateFields&>(*optimizer.state().at(parameter.unsafeGetTensorImpl()));
  if (state.master().defined()) return state.master().to(at::kDouble);
  if (!state.remainder().defined()) return parameter.detach().to(at::kDouble);
  if (state.remainder().scalar_type() == at::kChar) return corrected_values(parameter, state.remainder());
  const Tensor high = parameter.detach().contiguous().view(at::kShort).to(at::kInt) * 65536;
  return (high + state.remainder().contiguous().to(at::kInt)).view(at::kFloat).to(at::kDouble);
}

// Gradients that do not follow the weights, so that errors of weights come from their rounding alone.
template <class Optimizer, class Options>
Tensor values_after(int steps, const Options& options) {
  torch::manual_seed(3);
  const std::vector<Tensor> p = {torch::randn({64, 30}).to(at::kBFloat16).requires_grad_()};
  Optimizer optimizer(p, options);
  for (int step = 0; step < steps; ++step) {
    p[0].mutable_grad() = torch::randn({64, 30}).to(at::kBFloat16);
    optimizer.step();
  }
  return held_values(optimizer, p[0]);
}

bool same_by_name(const NamedTensors& a, const NamedTensors& b) {
  bool same = a.size() == b.size();
  for (const auto& [name, tensor] : a) same = same && b.count(name) == 1 && same_bits(tensor, b.at(name));
  return same;
}

double rms(const Tensor& values) { return values.square().mean().sqrt().item<double>(); }

}  // namespace

// Each store of a weight rounds it by 2^-15 of it at most and by some 2^-15 / sqrt(12) as a root mean square, as likely
// up as down. A decay takes of the errors what it takes of the weights, and no other term of AdamW knows them.
TEST_CASE("200 steps with 8-bit remainders end where those with fp32 masters do",
          "[fused_adam][remainder8]") {
  const auto options = FusedAdamWOptions(1e-3).weight_decay(0.1);
  const auto of = [&](MasterWeights form) {
    return values_after<FusedAdamW>(200, FusedAdamWOptions(options).master_weights(form));
  };
  const Tensor exact = of(MasterWeights::fp32), ours = of(MasterWeights::remainder_8);
  const double largest = exact.abs().max().item<double>();
  CHECK(distance(ours, exact) > 0);
  CHECK(distance(ours, exact) < 200 * kRounding * largest);
  const double of_one = kRounding / std::sqrt(12.0) * rms(exact);
  INFO("root mean square, in roundings: " << rms(ours - exact) / of_one);
  CHECK(rms(ours - exact) < std::sqrt(200.0) * of_one);
  CHECK(rms(of(MasterWeights::none) - exact) > 20 * rms(ours - exact));
}

TEST_CASE("every rule that takes 16-bit weights takes 8-bit remainders", "[optimizers][remainder8]") {
  const auto stays_near = [](const char* name, const auto& of) {
    INFO(name);
    const Tensor exact = of(MasterWeights::fp32), ours = of(MasterWeights::remainder_8);
    CHECK(distance(ours, exact) > 0);
    CHECK(distance(ours, exact) < 40 * 2 * kRounding * exact.abs().max().item<double>());
  };
  stays_near("FusedAdam", [](MasterWeights form) {
    return values_after<FusedAdam>(40, FusedAdamOptions(1e-3).master_weights(form));
  });
  stays_near("FusedLamb", [](MasterWeights form) {
    return values_after<FusedLamb>(40, FusedLambOptions(1e-3).master_weights(form));
  });
  stays_near("FusedSgd", [](MasterWeights form) {
    return values_after<FusedSgd>(40, FusedSgdOptions(1e-3).momentum(0.9).master_weights(form));
  });
  stays_near("FusedRmsprop", [](MasterWeights form) {
    return values_after<FusedRmsprop>(40, FusedRmspropOptions(1e-3).master_weights(form));
  });
  stays_near("ScheduleFreeAdamW", [](MasterWeights form) {
    return values_after<ScheduleFreeAdamW>(40, ScheduleFreeAdamWOptions(1e-3).master_weights(form));
  });
  stays_near("FusedAdamW in 8 bits", [](MasterWeights form) {
    return values_after<FusedAdamW>(40, FusedAdamWOptions(1e-3).state_bits(8).master_weights(form));
  });
}

TEST_CASE("whole tensors are joined and split as the kernels do it, to the bit", "[optimizers][remainder8]") {
  std::vector<float> floats;
  for_floats_around_every_boundary(16, [&](float value) { floats.push_back(value); });
  const Tensor values = at::tensor(floats);
  const detail::SplitValue parts = detail::split_value(values, at::kChar);
  const Tensor joined = detail::joined_value(parts.rounded, parts.remainder);
  int64_t wrong = 0;
  for (size_t i = 0; i < floats.size(); ++i) {
    const kernels::BFloat16AndCorrection wanted = kernels::split_24(floats[i]);
    const auto rounded = static_cast<uint16_t>(parts.rounded.data_ptr<at::BFloat16>()[i].x);
    wrong += parts.remainder.data_ptr<int8_t>()[i] != wanted.correction;
    wrong += std::isnan(floats[i]) ? (rounded & 0x7FC0) != 0x7FC0 : rounded != wanted.rounded.bits;
    wrong += !same_number(joined.data_ptr<float>()[i], kernels::join_24(wanted.rounded, wanted.correction));
  }
  CHECK(wrong == 0);
  // Numbers that somebody else has written.
  const Tensor written = at::tensor({0.0f, -0.0f, HUGE_VALF, -HUGE_VALF}).to(at::kBFloat16);
  const Tensor corrections = at::tensor({-5, 5, 5, -5}).to(at::kChar);
  CHECK(same_bits(detail::joined_value(written, corrections), written.to(at::kFloat)));
}

TEST_CASE("a step that moves nothing leaves every weight and correction as they are",
          "[fused_adam][remainder8]") {
  const Tensor all = at::arange(0x10000, at::kInt).to(at::kShort).view(at::kBFloat16);
  const Tensor finite = all.index({all.isfinite()});
  const std::vector<Tensor> p = {finite.clone().requires_grad_()};
  FusedAdamW optimizer(p, FusedAdamWOptions(0).weight_decay(0).master_weights(MasterWeights::remainder_8));
  p[0].mutable_grad() = torch::ones_like(p[0]);
  optimizer.step();
  CHECK(same_bits(p[0], finite));
  CHECK(count_true(state_of(optimizer, p[0]).remainder().ne(0)) == 0);
  const Tensor largest = 127 - all.index({all.isfinite()}).view(at::kShort).to(at::kInt).bitwise_and(1);
  const Tensor outward = at::where(finite.signbit(), largest.neg(), largest).to(at::kChar);
  state_of(optimizer, p[0]).remainder().copy_(outward);
  optimizer.step();
  CHECK(same_bits(p[0], finite));
  CHECK(same_bits(state_of(optimizer, p[0]).remainder(), outward));
}

TEST_CASE("changing to 8-bit remainders rounds a weight once, and changing from them not at all",
          "[fused_adam][remainder8]") {
  torch::manual_seed(58);
  std::vector<Tensor> p = random_parameters({{500}, {3, 7}}, at::kBFloat16);
  p.push_back(torch::randn({6, 5}).to(at::kBFloat16).slice(1, 0, 5, 2).detach().requires_grad_());
  FusedAdamW optimizer(p, FusedAdamWOptions(0.01).master_weights(MasterWeights::fp32));
  const auto held = [&] {
    std::vector<Tensor> values;
    for (const Tensor& each : p) values.push_back(held_values(optimizer, each));
    return values;
  };
  for (const auto form : {MasterWeights::remainder_8, MasterWeights::remainder, MasterWeights::remainder_8,
                          MasterWeights::fp32, MasterWeights::remainder, MasterWeights::remainder_8}) {
    options_of(optimizer).lr(0.01);
    for (int step = 0; step < 3; ++step) set_random_gradients(p), optimizer.step();
    const std::vector<Tensor> before = held();
    options_of(optimizer).master_weights(form).lr(0);  // a step that changes nothing but the form
    set_random_gradients(p);
    optimizer.step();
    const std::vector<Tensor> after = held();
    for (size_t i = 0; i < p.size(); ++i) {
      const bool is_rounded = form == MasterWeights::remainder_8;
      const Tensor bound = before[i].abs() * (is_rounded ? kRounding : 0);
      CHECK(count_true((after[i] - before[i]).abs() > bound) == 0);
      const auto& state = state_of(optimizer, p[i]);
      CHECK(state.master().defined() == (form == MasterWeights::fp32));
      if (!state.remainder().defined()) continue;
      CHECK(state.remainder().scalar_type() == (is_rounded ? at::kChar : at::kShort));
    }
  }
}

TEST_CASE("weights without masters become 8-bit remainders of themselves", "[fused_adam][remainder8]") {
  torch::manual_seed(59);
  const std::vector<Tensor> p = random_parameters({{300}}, at::kBFloat16);
  FusedAdamW optimizer(p, FusedAdamWOptions(0.01).master_weights(MasterWeights::none));
  set_random_gradients(p);
  optimizer.step();
  const Tensor before = copy_of(p[0]);
  options_of(optimizer).master_weights(MasterWeights::remainder_8).lr(0);
  optimizer.step();
  CHECK(same_bits(p[0], before));
  CHECK(count_true(state_of(optimizer, p[0]).remainder().ne(0)) == 0);
}

TEST_CASE("archives and states by name bring 8-bit remainders, and other forms that become them",
          "[fused_adam][remainder8]") {
  using Form = MasterWeights;
  for (const auto from : {Form::remainder_8, Form::remainder, Form::fp32, Form::none}) {
    for (const auto to : {Form::remainder_8, Form::remainder, Form::fp32}) {
      for (const bool by_name : {false, true}) {
        CAPTURE(static_cast<int>(from), static_cast<int>(to), by_name);
        torch::manual_seed(61);
        const std::vector<Tensor> p = random_parameters({{70}, {5, 9}}, at::kBFloat16);
        const std::vector<Tensor> others = random_parameters({{70}, {5, 9}}, at::kBFloat16);
        FusedAdamW saved(p, FusedAdamWOptions(0.01).master_weights(from));
        FusedAdamW loaded(others, FusedAdamWOptions(0.3).master_weights(to));
        for (int step = 0; step < 4; ++step) set_random_gradients(p), saved.step();
        if (by_name) {
          loaded.import_state(as_file(saved.export_state()));
        } else {
          std::stringstream file;
          torch::save(saved, file);
          torch::load(loaded, file);
        }
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < p.size(); ++i) others[i].copy_(p[i]);
        // The form comes with the state; from here on both change to the other.
        CHECK(options_of(loaded).master_weights() == from);
        for (const auto form : {from, to, from}) {
          options_of(saved).master_weights(form);
          options_of(loaded).master_weights(form);
          set_random_gradients(p, others);
          saved.step();
          loaded.step();
          CHECK(same_bits(p, others));
          CHECK(same_by_name(saved.export_state(), loaded.export_state()));
        }
      }
    }
  }
}

TEST_CASE("a state by name may have a remainder of the width that was set since its last step",
          "[fused_adam][remainder8]") {
  const auto p = random_parameters({{70}}, at::kBFloat16), others = clones(p);
  FusedAdamW saved(p, FusedAdamWOptions(0.01).master_weights(MasterWeights::remainder));
  FusedAdamW loaded(others, FusedAdamWOptions(0.01));
  for (int step = 0; step < 4; ++step) set_random_gradients(p), saved.step();
  options_of(saved).master_weights(MasterWeights::remainder_8);
  loaded.import_state(as_file(saved.export_state()));
  const torch::NoGradGuard no_grad;
  others[0].copy_(p[0]);
  set_random_gradients(p, others);
  saved.step();
  loaded.step();
  CHECK(same_bits(p, others));
  CHECK(same_by_name(saved.export_state(), loaded.export_state()));
}

TEST_CASE("moments in 8 bits and 8-bit remainders are 3.125 bytes a parameter", "[fused_adam][remainder8]") {
  constexpr int64_t kElements = 32 * 1024;
  const std::vector<Tensor> p = {torch::ones({kElements}, at::kBFloat16).requires_grad_()};
  FusedAdamW optimizer(p, FusedAdamWOptions(0.01).state_bits(8).master_weights(MasterWeights::remainder_8));
  p[0].mutable_grad() = torch::ones_like(p[0]);
  optimizer.step();
  const auto& state = state_of(optimizer, p[0]);
  int64_t bytes = 0;
  for (const Tensor& tensor : {state.exp_avg(), state.exp_avg_sq(), state.exp_avg_scale(),
                               state.exp_avg_sq_scale(), state.remainder()}) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  CHECK(bytes * 8 == kElements * 25);
  CHECK_FALSE(state.master().defined());
}

TEST_CASE("a 1-bit optimizer takes 8-bit remainders, before and after its freeze",
          "[onebit_adam][remainder8]") {
  const auto of = [](MasterWeights form) {
    const auto options = OneBitAdamOptions(1e-3).freeze_step(4).compress_alone(true).allow_early_freeze(true);
    return values_after<OneBitAdam>(12, OneBitAdamOptions(options).master_weights(form));
  };
  const Tensor exact = of(MasterWeights::fp32), ours = of(MasterWeights::remainder_8);
  CHECK(distance(ours, exact) > 0);
  CHECK(distance(ours, exact) < 12 * kRounding * exact.abs().max().item<double>());
}

TEST_CASE("what cannot have 8-bit remainders refuses them in a sentence", "[fused_adam][remainder8]") {
  const auto options = FusedAdamWOptions(0.01).master_weights(MasterWeights::remainder_8);
  const auto halves = random_parameters({{4}}, at::kHalf);
  FusedAdamW of_halves(halves, options);
  set_random_gradients(halves);
  CHECK(unless_refused(of_halves, {"is fp16", "MasterWeights::fp32"}, [&] { of_halves.step(); }) == "");
  CHECK(contains(
      refusal([&] { FusedAdamW(halves, FusedAdamWOptions(options).rounding(Rounding::stochastic)); }),
      "MasterWeights::none"));
  const auto p = random_parameters({{4}}, at::kBFloat16);
  FusedAdamW optimizer(p, options);
  set_random_gradients(p);
  optimizer.step();
  state_of(optimizer, p[0]).remainder(torch::zeros({4}, at::kInt));
  CHECK(unless_refused(optimizer, {"remainder", "int16 or int8"}, [&] { optimizer.step(); }) == "");
}

}  // namespace pacer::testing
