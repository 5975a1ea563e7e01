// bf16 and fp16 parameters: with a master copy or a remainder they follow the fp32 run to the bit.
#include "support/catch.h"

#include <sstream>

#include <torch/serialize.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {
namespace {

FusedAdamWOptions options_for(const Mode& mode, bool amsgrad = false) {
  return with_mode(FusedAdamWOptions(0.01).weight_decay(0.1).amsgrad(amsgrad), mode);
}

// The fp32 value that a bf16 and the 16 bits below it stand for: the difference of two integers, read as a
// float.
Tensor joined(const Tensor& parameter, const Tensor& remainder) {
  const Tensor high = parameter.detach().contiguous().view(at::kShort).to(at::kInt) * 65536;
  return (high + remainder.contiguous().to(at::kInt)).view(at::kFloat);
}

// The fp32 value behind a parameter, in whatever form the optimizer keeps it.
Tensor master_of(FusedAdamW& optimizer, const Tensor& parameter) {
  const auto& state = state_of(optimizer, parameter);
  if (state.master().defined()) return state.master();
  return state.remainder().defined() ? joined(parameter, state.remainder()) : Tensor();
}

// Rounded to bf16, halves away from zero: what the remainder is relative to.
Tensor rounded_half_away(const Tensor& values) {
  return ((values.contiguous().view(at::kInt) + 0x8000).bitwise_right_shift(16))
      .to(at::kShort)
      .view(at::kBFloat16);
}

bool is_rounded_master(FusedAdamW& optimizer, const Tensor& parameter) {
  const auto& state = state_of(optimizer, parameter);
  const Tensor rounded = state.master().defined() ? state.master().to(parameter.scalar_type())
                                                  : rounded_half_away(joined(parameter, state.remainder()));
  return same_bits(rounded, parameter);
}

std::vector<Mode> modes_with_master() {
  std::vector<Mode> modes;
  for (const Mode& mode : all_modes()) {
    if (mode.master_weights == MasterWeights::fp32 || mode.master_weights == MasterWeights::remainder) {
      modes.push_back(mode);
    }
  }
  return modes;
}

TEST_CASE("with a master copy or a remainder, 16-bit parameters follow the fp32 run to the bit",
          "[fused_adam]") {
  for (const Mode& mode : modes_with_master()) {
    for (const bool amsgrad : {false, true}) {
      CAPTURE(mode.name, amsgrad);
      torch::manual_seed(51);
      auto parameters = random_parameters({{40, 3}, {129}, {}, {0}}, mode.dtype);
      parameters.push_back(torch::randn({6, 5}).to(mode.dtype).t().requires_grad_());
      parameters.push_back(torch::randn({6, 5}).to(mode.dtype).slice(1, 0, 5, 2).detach().requires_grad_());
      std::vector<Tensor> full;
      for (const Tensor& p : parameters) full.push_back(p.detach().to(at::kFloat).requires_grad_());
      FusedAdamW optimizer(parameters, options_for(mode, amsgrad)),
          reference(full, options_for(all_modes()[1], amsgrad));
      for (int step = 0; step < 50; ++step) {
        set_random_gradients(parameters, full, at::kFloat);
        optimizer.step();
        reference.step();
        for (size_t i = 0; i < parameters.size(); ++i) {
          REQUIRE(same_bits(master_of(optimizer, parameters[i]), full[i]));
          REQUIRE(is_rounded_master(optimizer, parameters[i]));
        }
      }
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto &mine = state_of(optimizer, parameters[i]), &theirs = state_of(reference, full[i]);
        CHECK(same_bits(mine.exp_avg(), theirs.exp_avg()));
        CHECK(same_bits(mine.exp_avg_sq(), theirs.exp_avg_sq()));
        CHECK(same_bits(mine.max_exp_avg_sq(), theirs.max_exp_avg_sq()));
        CHECK(mine.remainder().defined() == (mode.master_weights == MasterWeights::remainder));
        CHECK(mine.master().defined() == (mode.master_weights == MasterWeights::fp32));
      }
    }
  }
}

TEST_CASE("automatic means a remainder for bf16, an fp32 copy for fp16, nothing otherwise", "[fused_adam]") {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble}) {
    const auto parameters = random_parameters({{4}}, dtype);
    FusedAdamW optimizer(parameters);
    set_random_gradients(parameters);
    optimizer.step();
    const auto& state = state_of(optimizer, parameters[0]);
    CHECK(state.remainder().defined() == (dtype == at::kBFloat16));
    CHECK(state.master().defined() == (dtype == at::kHalf));
    if (state.remainder().defined()) CHECK(state.remainder().scalar_type() == at::kShort);
    if (state.master().defined()) CHECK(state.master().scalar_type() == at::kFloat);
    CHECK(state.exp_avg().scalar_type() == (dtype == at::kDouble ? at::kDouble : at::kFloat));
  }
}

TEST_CASE("one optimizer takes parameters of all dtypes", "[fused_adam]") {
  torch::manual_seed(52);
  std::vector<Tensor> together, alone;
  for (const auto dtype : {at::kBFloat16, at::kDouble, at::kHalf, at::kFloat, at::kBFloat16, at::kDouble}) {
    together.push_back(random_parameters({{33}}, dtype)[0]);
    alone.push_back(clones({together.back()})[0]);
  }
  FusedAdamW optimizer(together);
  std::vector<std::unique_ptr<FusedAdamW>> singles;
  for (const Tensor& parameter : alone)
    singles.push_back(std::make_unique<FusedAdamW>(std::vector<Tensor>{parameter}));
  for (int step = 0; step < 5; ++step) {
    set_random_gradients(together, alone);
    optimizer.step();
    for (auto& single : singles) single->step();
    REQUIRE(same_bits(together, alone));
  }
}

struct UserWrite {
  const char* name;
  void (*write)(const Tensor& parameter);
};

// What the user writes into a parameter between two steps counts: the next step starts from there.
TEST_CASE("a master copy follows what the user writes into the parameter", "[fused_adam]") {
  const std::vector<UserWrite> writes = {
      {"halved", [](const Tensor& p) { p.mul_(0.5); }},
      {"part overwritten", [](const Tensor& p) { p.slice(0, 0, 1).fill_(3); }},
      {"filled", [](const Tensor& p) { p.fill_(-2); }},
      {"given new memory", [](const Tensor& p) { p.set_data(torch::full_like(p, 0.75)); }},
  };
  for (const Mode& mode : modes_with_master()) {
    for (const UserWrite& write : writes) {
      CAPTURE(mode.name, write.name);
      torch::manual_seed(55);
      auto parameters = random_parameters({{9, 3}, {70}}, mode.dtype);
      std::vector<Tensor> full;
      for (const Tensor& p : parameters) full.push_back(p.detach().to(at::kFloat).requires_grad_());
      FusedAdamW optimizer(parameters, options_for(mode)), reference(full, options_for(all_modes()[1]));
      for (int round = 0; round < 2; ++round) {
        for (int step = 0; step < 3; ++step) {
          set_random_gradients(parameters, full, at::kFloat);
          optimizer.step();
          reference.step();
        }
        const Tensor before = copy_of(parameters[0]);
        {
          torch::NoGradGuard no_grad;
          write.write(parameters[0]);
          // Where the value changed, the fp32 run continues from it; elsewhere from what it had.
          full[0].copy_(torch::where(parameters[0].ne(before), parameters[0].to(at::kFloat), full[0]));
        }
        const Tensor written = copy_of(full[0]);
        set_random_gradients(parameters, full, at::kFloat);
        optimizer.step();
        reference.step();
        CHECK(same_bits(master_of(optimizer, parameters[1]), full[1]));
        CHECK(is_rounded_master(optimizer, parameters[0]));
        if (mode.master_weights == MasterWeights::fp32) {
          CHECK(same_bits(master_of(optimizer, parameters[0]), full[0]));
        } else {
          // The remainder's 16 bits stay: the value is the user's to half a unit in the last place of bf16.
          const Tensor allowed = written.abs() * 0x1p-8 + 1e-6;
          CHECK((master_of(optimizer, parameters[0]) - full[0]).abs().le(allowed).all().item<bool>());
          torch::NoGradGuard no_grad;
          full[0].copy_(master_of(optimizer, parameters[0]));
        }
      }
    }
  }
}

// data() is a door around the version counter.
TEST_CASE("a write through data() counts", "[fused_adam]") {
  for (const Mode& mode : modes_with_master()) {
    CAPTURE(mode.name);
    auto parameters = random_parameters({{9, 3}}, mode.dtype);
    FusedAdamW optimizer(parameters, options_for(mode));
    set_random_gradients(parameters);
    optimizer.step();
    parameters[0].data().fill_(0.75);
    options_of(optimizer).lr(0);
    optimizer.step();
    CHECK(count_true(parameters[0].eq(0.75)) == 27);
  }
}

TEST_CASE("new weights loaded into the module win over the master copy", "[fused_adam]") {
  for (const Mode& mode : modes_with_master()) {
    CAPTURE(mode.name);
    torch::manual_seed(56);
    auto parameters = random_parameters({{50}}, mode.dtype);
    FusedAdamW optimizer(parameters, options_for(mode));
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(parameters);
      optimizer.step();
    }
    std::stringstream file;
    const Tensor weights = torch::randn({50}).to(mode.dtype);
    torch::save(weights, file);
    torch::load(parameters[0], file);
    REQUIRE(same_bits(parameters[0], weights));
    options_of(optimizer).lr(0);
    parameters[0].mutable_grad() = torch::ones({50}, mode.dtype);
    optimizer.step();
    CHECK(same_bits(parameters[0], weights));
  }
}

TEST_CASE("a loaded master copy that is not the parameter's gives way to the parameter", "[fused_adam]") {
  for (const Mode& mode : modes_with_master()) {
    CAPTURE(mode.name);
    torch::manual_seed(57);
    auto parameters = random_parameters({{50}}, mode.dtype), others = random_parameters({{50}}, mode.dtype);
    FusedAdamW optimizer(parameters, options_for(mode)), restored(others, options_for(mode));
    set_random_gradients(parameters);
    optimizer.step();
    std::stringstream file;
    torch::save(optimizer, file);
    torch::load(restored, file);
    const Tensor before = copy_of(others[0]);
    options_of(restored).lr(0);
    others[0].mutable_grad() = torch::ones({50}, mode.dtype);
    restored.step();
    CHECK(same_bits(others[0], before));
  }
}

TEST_CASE("changing how the master value is kept loses none of it", "[fused_adam]") {
  torch::manual_seed(58);
  auto parameters = random_parameters({{500}, {3, 7}}, at::kBFloat16);
  std::vector<Tensor> full;
  for (const Tensor& p : parameters) full.push_back(p.detach().to(at::kFloat).requires_grad_());
  FusedAdamW optimizer(parameters, options_for(all_modes()[2])), reference(full, options_for(all_modes()[1]));
  for (const auto form : {MasterWeights::remainder, MasterWeights::fp32, MasterWeights::remainder,
                          MasterWeights::automatic, MasterWeights::fp32}) {
    options_of(optimizer).master_weights(form);
    for (int step = 0; step < 3; ++step) {
      set_random_gradients(parameters, full, at::kFloat);
      optimizer.step();
      reference.step();
      for (size_t i = 0; i < 2; ++i) REQUIRE(same_bits(master_of(optimizer, parameters[i]), full[i]));
    }
  }
  // A value exactly between two bf16 numbers, which the two forms round differently.
  for (const Tensor& p : parameters) state_of(optimizer, p).exp_avg().zero_();
  options_of(optimizer).master_weights(MasterWeights::remainder).lr(0);
  optimizer.step();
  state_of(optimizer, parameters[0]).remainder().fill_(-32768);
  const Tensor value = joined(parameters[0], state_of(optimizer, parameters[0]).remainder()).clone();
  options_of(optimizer).master_weights(MasterWeights::fp32);
  optimizer.step();
  CHECK(same_bits(master_of(optimizer, parameters[0]), value));
}

}  // namespace
}  // namespace pacer::testing
