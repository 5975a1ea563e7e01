// state_bits(8) for every rule that has it: what the state is, and how it passes from one format to the other, through files
// and by hand.
#include "support/catch.h"

#include "support/checkpoints/archives.h"
#include "support/kernels/lamb.h"
#include "support/optimizers/state_8bit.h"

namespace pacer::testing {

TEMPLATE_TEST_CASE("state in 8 bits takes 2.125 bytes a parameter", "[fused_adam][fused_lamb][adam8]",
                   FusedAdamW, FusedLamb) {
  using Run = StateRun<TestType>;
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    INFO(mode.name);
    Run run(random_parameters({{64, 32}}, mode.dtype), with_mode(in_8_bits<TestType>(), mode));
    run.step(2, 1);
    CHECK(run.state().exp_avg().scalar_type() == at::kChar);
    CHECK(run.state().exp_avg_sq().scalar_type() == at::kByte);
    CHECK(run.state().exp_avg().sizes() == at::IntArrayRef{64, 32});
    size_t bytes = 0;
    for (const Tensor& tensor : {run.state().exp_avg(), run.state().exp_avg_sq(), run.state().exp_avg_scale(),
                                 run.state().exp_avg_sq_scale()}) {
      bytes += tensor.nbytes();
    }
    CHECK(static_cast<double>(bytes) / run.parameters[0].numel() == 2.125);
  }
}

TEMPLATE_TEST_CASE("codes follow the memory order of the parameter", "[fused_adam][fused_lamb][adam8]",
                   FusedAdamW, FusedLamb) {
  torch::manual_seed(1);
  const Tensor image = torch::randn({2, 3, 4, 5});
  const Tensor last = image.clone().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const Tensor flat = image.permute({0, 2, 3, 1}).reshape({-1}).clone().requires_grad_();
  const Tensor gapped = torch::randn({6, 8}).slice(1, 2, 5).detach().requires_grad_();
  const Tensor dense = gapped.detach().contiguous().clone().requires_grad_();
  TestType a({last, gapped}, in_8_bits<TestType>()), b({flat, dense}, in_8_bits<TestType>());
  for (int step = 0; step < 5; ++step) {
    last.mutable_grad() = torch::randn_like(image).contiguous();
    flat.mutable_grad() = last.grad().permute({0, 2, 3, 1}).reshape({-1}).clone();
    gapped.mutable_grad() = torch::randn({6, 3});
    dense.mutable_grad() = gapped.grad().clone();
    a.step(), b.step();
  }
  CHECK(same_bits(last.permute({0, 2, 3, 1}).reshape({-1}), flat));
  CHECK(same_bits(gapped, dense));
  CHECK(same_bits(state_of(a, last).exp_avg_scale(), state_of(b, flat).exp_avg_scale()));
  CHECK(same_bits(state_of(a, last).exp_avg().permute({0, 2, 3, 1}).reshape({-1}),
                  state_of(b, flat).exp_avg()));
}

TEMPLATE_TEST_CASE("a change of state_bits converts the state at the next step",
                   "[fused_adam][fused_lamb][adam8]", FusedAdamW, FusedLamb) {
  using Run = StateRun<TestType>;
  const auto values = random_parameters(kStateShapes, at::kFloat);
  for (const int64_t to : {int64_t{32}, int64_t{8}}) {
    INFO("to " << to);
    Run run(values, OptionsOf<TestType>(0.02).state_bits(40 - to)), other(values, OptionsOf<TestType>(0.02));
    run.step(4, 2);
    // What the conversion has to come to: another optimizer with those numbers.
    for (size_t i = 0; i < values.size(); ++i) {
      auto state = std::make_unique<ParamStateOf<TestType>>();
      state->step(4);
      const auto& was = run.state(i);
      const bool codes = to == 32;
      state->exp_avg(codes ? decoded_moment(was.exp_avg(), was.exp_avg_scale(), false).to(at::kFloat)
                           : was.exp_avg().clone());
      state->exp_avg_sq(codes ? decoded_moment(was.exp_avg_sq(), was.exp_avg_sq_scale(), true).to(at::kFloat)
                              : was.exp_avg_sq().clone());
      other.optimizer.state()[other.parameters[i].unsafeGetTensorImpl()] = std::move(state);
      const torch::NoGradGuard no_grad;
      other.parameters[i].copy_(run.parameters[i]);
    }
    options_of(run.optimizer).state_bits(to);
    run.step(1, 3), other.step(1, 3);
    CHECK(run.state().exp_avg_scale().defined() == (to == 8));
    CHECK(distance(run.parameters, other.parameters) < (to == 32 ? 1e-6 : 0.02));
    run.step(3, 4);
    CHECK(run.state().step() == 8);
  }
}

TEMPLATE_TEST_CASE("state in 8 bits resumes to the bit, by name and from an archive",
                   "[fused_adam][fused_lamb][adam8]", FusedAdamW, FusedLamb) {
  using Run = StateRun<TestType>;
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    INFO(mode.name);
    auto values = random_parameters(kStateShapes, mode.dtype);
    values.push_back(torch::randn({40, 3}).to(mode.dtype).t().detach().requires_grad_());
    const auto options = with_mode(in_8_bits<TestType>(), mode);
    Run unbroken(values, options), by_name(values, options), by_archive(values, options);
    unbroken.step(5, 1);
    by_name.optimizer.import_state(as_file(unbroken.optimizer.export_state()));
    load_from(by_archive.optimizer, saved(unbroken.optimizer));
    for (size_t i = 0; i < values.size(); ++i) {
      const torch::NoGradGuard no_grad;
      by_name.parameters[i].copy_(unbroken.parameters[i]);
      by_archive.parameters[i].copy_(unbroken.parameters[i]);
    }
    for (Run* run : {&unbroken, &by_name, &by_archive}) run->step(4, 2);
    CHECK(difference(snapshot(unbroken.optimizer), snapshot(by_name.optimizer)).empty());
    CHECK(difference(snapshot(unbroken.optimizer), snapshot(by_archive.optimizer)).empty());
  }
}

TEMPLATE_TEST_CASE("a load converts between 8 and 32 bits, and keeps the run's own state_bits",
                   "[fused_adam][fused_lamb][adam8]", FusedAdamW, FusedLamb) {
  using Run = StateRun<TestType>;
  auto values = random_parameters(kStateShapes, at::kFloat);
  values.push_back(torch::randn({40, 3}).t().detach().requires_grad_());
  for (const bool from_8 : {true, false}) {
    for (const bool by_name : {true, false}) {
      INFO((from_8 ? "from 8 bits" : "from 32 bits") << (by_name ? ", by name" : ", an archive"));
      const int64_t from = from_8 ? 8 : 32;
      Run source(values, OptionsOf<TestType>(0.02).state_bits(from));
      source.step(4, 1);
      Run loaded(source.parameters, OptionsOf<TestType>(0.02).state_bits(40 - from));
      if (by_name) {
        loaded.optimizer.import_state(as_file(source.optimizer.export_state()));
      } else {
        load_from(loaded.optimizer, saved(source.optimizer));
      }
      CHECK(options_of(loaded.optimizer).state_bits() == 40 - from);
      options_of(source.optimizer).state_bits(40 - from);  // it converts in the same way
      source.step(3, 2), loaded.step(3, 2);
      CHECK(difference(snapshot(source.optimizer), snapshot(loaded.optimizer)).empty());
      CHECK(loaded.state().exp_avg_scale().defined() == !from_8);
    }
  }
}

TEMPLATE_TEST_CASE("state in 8 bits that does not fit is refused and changes nothing",
                   "[fused_adam][fused_lamb][adam8]", FusedAdamW, FusedLamb) {
  using Run = StateRun<TestType>;
  const auto values = random_parameters({{5, 8}}, at::kFloat);
  Run source(values, in_8_bits<TestType>()), own(values, in_8_bits<TestType>());
  source.step(2, 1), own.step(1, 2);
  const auto file = as_file(source.optimizer.export_state());
  const auto outcome = [&](const std::vector<std::string>& parts, const auto& change) {
    NamedTensors changed = file;
    change(changed);
    return unless_refused(own.optimizer, parts, [&] { own.optimizer.import_state(changed); });
  };
  CHECK(outcome({"0.0/exp_avg_scale"}, [](NamedTensors& s) { s.erase("0.0/exp_avg_scale"); }).empty());
  CHECK(outcome({"exp_avg_scale", "[3]", "[2]"}, [](NamedTensors& s) {
          s["0.0/exp_avg_scale"] = torch::zeros({3}, at::kHalf);
        }).empty());
  CHECK(outcome({"exp_avg_sq_scale", "Float"}, [](NamedTensors& s) {
          s["0.0/exp_avg_sq_scale"] = torch::zeros({2});
        }).empty());
  CHECK(outcome({"exp_avg\"", "Byte", "Char"}, [](NamedTensors& s) {
          s["0.0/exp_avg"] = torch::zeros({5, 8}, at::kByte);
        }).empty());
  CHECK(outcome({"memory order"}, [](NamedTensors& s) {
          s["0.0/strides"] = torch::tensor({1, 5}, at::kLong);
        }).empty());
  CHECK(outcome({}, [](NamedTensors&) {}) == "<no exception>");
  // By hand.
  own.step(1, 3);
  own.state().exp_avg_scale(Tensor());
  CHECK(unless_refused(own.optimizer, {"codes of exp_avg", "scales"}, [&] { own.optimizer.step(); }).empty());
  own.state().exp_avg_scale(torch::zeros({2}));
  CHECK(unless_refused(own.optimizer, {"exp_avg_scale", "Float"}, [&] { own.optimizer.step(); }).empty());
}

}  // namespace pacer::testing
