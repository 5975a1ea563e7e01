// FusedAdam and FusedAdamW with state_bits(8): what the state is, how far a training goes from one in 32 bits, and how
// state passes from one format to the other.
#include "support/catch.h"

#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/muon.h>

#include "own_optimizer/lion.h"
#include "support/checkpoints/archives.h"
#include "support/optimizers/twins.h"

namespace pacer::testing {
namespace {

FusedAdamWOptions in_8_bits(const FusedAdamWOptions& options = FusedAdamWOptions(0.02)) {
  return FusedAdamWOptions(options).state_bits(8);
}

struct Run {
  std::vector<Tensor> parameters;
  FusedAdamW optimizer;

  Run(const std::vector<Tensor>& values, const FusedAdamWOptions& options)
      : parameters(clones(values)), optimizer(parameters, options) {}
  void step(int steps, uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < steps; ++i) {
      set_random_gradients(parameters);
      optimizer.step();
    }
  }
  FusedAdamWParamState& state(size_t i = 0) { return state_of(optimizer, parameters[i]); }
};

const std::vector<std::vector<int64_t>> kShapes = {{}, {31}, {32}, {33}, {7, 19}, {0, 3}, {2500}};

// By name, as a file has them: row by row.
NamedTensors as_file(const NamedTensors& state) {
  NamedTensors file;
  for (const auto& [name, tensor] : state) file[name] = tensor.clone().contiguous();
  return file;
}

Tensor decoded(const Tensor& codes, const Tensor& scales, bool second) {
  const Tensor of_each = scales.to(at::kDouble).repeat_interleave(32).slice(0, 0, codes.numel());
  const Tensor code = codes.reshape({-1}).to(at::kDouble);
  const Tensor z = code / 127;
  const Tensor values = second ? (code / 255 * of_each).square() : z / (2 - z.abs()) * of_each;
  return values.view(codes.sizes());
}

}  // namespace

TEST_CASE("state in 8 bits takes 2.125 bytes a parameter", "[fused_adam][adam8]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    INFO(mode.name);
    Run run(random_parameters({{64, 32}}, mode.dtype), in_8_bits(with_mode(FusedAdamWOptions(0.02), mode)));
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

TEST_CASE("the first step in 8 bits is that in 32, which reads no moments", "[fused_adam][adam8]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble || mode.master_weights == MasterWeights::none) continue;
    INFO(mode.name);
    const auto values = random_parameters(kShapes, mode.dtype);
    const auto options = with_mode(FusedAdamWOptions(0.02).weight_decay(0.1), mode);
    Run wide(values, options), narrow(values, in_8_bits(options));
    wide.step(1, 3), narrow.step(1, 3);
    CHECK(same_bits(wide.parameters, narrow.parameters));
    wide.step(3, 4), narrow.step(3, 4);
    CHECK_FALSE(same_bits(wide.parameters, narrow.parameters));
    CHECK(distance(wide.parameters, narrow.parameters) < 4 * 0.02);
  }
}

// Its second moment is below half a code of its group's, and its first one is not.
TEST_CASE("an element with far smaller gradients than its neighbours takes no larger steps",
          "[fused_adam][adam8]") {
  Run run({torch::zeros({32}).requires_grad_()}, in_8_bits(FusedAdamWOptions(0.01).weight_decay(0)));
  const Tensor& p = run.parameters[0];
  Tensor before = p.detach().clone();
  for (int step = 0; step < 60; ++step) {
    // The others' signs change, so that their first moments are small.
    p.mutable_grad() = torch::full({32}, step % 2 == 0 ? 1.0 : -1.0);
    p.mutable_grad()[5] = 1e-3;
    run.optimizer.step();
    REQUIRE((p.detach() - before)[5].abs().item<double>() < 0.011);
    before = p.detach().clone();
  }
}

// Noise pushes both runs about their target, and in either the mean of the last half of the steps is its estimate. A code
// is at most 1/254 of the scale wrong near the scale and finer below, so that one update is off by a few hundredths
// of the rate; the errors of steps have no common sign.
TEST_CASE("200 steps in 8 bits end where those in 32 bits do", "[fused_adam][adam8]") {
  torch::manual_seed(7);
  const Tensor target = torch::randn({96, 80}), noise_of = torch::rand({96, 80}).mul(3).exp();
  const auto loss_after = [&](const FusedAdamWOptions& options) {
    Run run({torch::zeros({96, 80}).requires_grad_()}, options);
    torch::manual_seed(11);
    Tensor mean = torch::zeros_like(target);
    for (int step = 0; step < 200; ++step) {
      const Tensor& p = run.parameters[0];
      p.mutable_grad() = (p.detach() - target + torch::randn_like(target).mul(0.3)) * noise_of;
      run.optimizer.step();
      if (step >= 100) mean += run.parameters[0].detach() / 100;
    }
    return std::make_pair((mean - target).square().mean().sqrt().item<double>(),
                          run.parameters[0].detach().clone());
  };
  const auto options = FusedAdamWOptions(0.03).weight_decay(0);
  const auto [wide, wide_values] = loss_after(options);
  const auto [narrow, narrow_values] = loss_after(in_8_bits(options));
  INFO("from the target: " << wide << " and " << narrow << ", from each other "
                           << (wide_values - narrow_values).square().mean().sqrt().item<double>());
  CHECK(narrow < 1.02 * wide);
  CHECK((wide_values - narrow_values).square().mean().sqrt().item<double>() < 0.7 * 0.03);
}

TEST_CASE("codes follow the memory order of the parameter", "[fused_adam][adam8]") {
  torch::manual_seed(1);
  const Tensor image = torch::randn({2, 3, 4, 5});
  const Tensor last = image.clone().contiguous(at::MemoryFormat::ChannelsLast).requires_grad_();
  const Tensor flat = image.permute({0, 2, 3, 1}).reshape({-1}).clone().requires_grad_();
  const Tensor gapped = torch::randn({6, 8}).slice(1, 2, 5).detach().requires_grad_();
  const Tensor dense = gapped.detach().contiguous().clone().requires_grad_();
  FusedAdamW a({last, gapped}, in_8_bits()), b({flat, dense}, in_8_bits());
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

TEST_CASE("a change of state_bits converts the state at the next step", "[fused_adam][adam8]") {
  const auto values = random_parameters(kShapes, at::kFloat);
  for (const int64_t to : {int64_t{32}, int64_t{8}}) {
    INFO("to " << to);
    Run run(values, FusedAdamWOptions(0.02).state_bits(40 - to)), other(values, FusedAdamWOptions(0.02));
    run.step(4, 2);
    // What the conversion has to come to: another optimizer with those numbers.
    for (size_t i = 0; i < values.size(); ++i) {
      auto state = std::make_unique<FusedAdamWParamState>();
      state->step(4);
      const auto& was = run.state(i);
      const bool codes = to == 32;
      state->exp_avg(codes ? decoded(was.exp_avg(), was.exp_avg_scale(), false).to(at::kFloat)
                           : was.exp_avg().clone());
      state->exp_avg_sq(codes ? decoded(was.exp_avg_sq(), was.exp_avg_sq_scale(), true).to(at::kFloat)
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

TEST_CASE("state in 8 bits resumes to the bit, by name and from an archive", "[fused_adam][adam8]") {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    INFO(mode.name);
    auto values = random_parameters(kShapes, mode.dtype);
    values.push_back(torch::randn({40, 3}).to(mode.dtype).t().detach().requires_grad_());
    const auto options = in_8_bits(with_mode(FusedAdamWOptions(0.02), mode));
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

TEST_CASE("a load converts between 8 and 32 bits, and keeps the run's own state_bits",
          "[fused_adam][adam8]") {
  auto values = random_parameters(kShapes, at::kFloat);
  values.push_back(torch::randn({40, 3}).t().detach().requires_grad_());
  for (const bool from_8 : {true, false}) {
    for (const bool by_name : {true, false}) {
      INFO((from_8 ? "from 8 bits" : "from 32 bits") << (by_name ? ", by name" : ", an archive"));
      const int64_t from = from_8 ? 8 : 32;
      Run source(values, FusedAdamWOptions(0.02).state_bits(from));
      source.step(4, 1);
      Run loaded(source.parameters, FusedAdamWOptions(0.02).state_bits(40 - from));
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

TEST_CASE("state in 8 bits that does not fit is refused and changes nothing", "[fused_adam][adam8]") {
  const auto values = random_parameters({{5, 8}}, at::kFloat);
  Run source(values, in_8_bits()), own(values, in_8_bits());
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

TEST_CASE("what has no state in 8 bits refuses it in a sentence", "[fused_adam][adam8]") {
  const auto p = random_parameters({{4, 4}}, at::kFloat);
  const auto says = [](const auto& make, const std::string& part) { return contains(refusal(make), part); };
  CHECK(
      says([&] { FusedAdamW(p, FusedAdamWOptions().state_bits(16)); }, "state_bits must be 8 or 32, not 16"));
  CHECK(says([&] { FusedAdamW(p, FusedAdamWOptions().state_bits(8).amsgrad(true)); }, "amsgrad"));
  CHECK(says([&] { FusedAdamW(p, FusedAdamWOptions().state_bits(8).paged(Paging())); }, "paged()"));
  CHECK(says([&] { FusedLamb(p, FusedLambOptions().state_bits(8)); }, "leave state_bits at 32"));
  CHECK(says([&] { Muon(p, MuonOptions().state_bits(8)); }, "orthogonalize(false)"));
  CHECK(says([&] { Lion(p, lion_options(0.01).state_bits(8)); }, "leave state_bits at 32"));
  const auto wide = random_parameters({{4, 4}}, at::kDouble);
  Run run(wide, in_8_bits());
  CHECK(contains(refusal([&] { run.step(1, 1); }), "is fp64"));
}

TEST_CASE("Muon's groups of AdamW may have state in 8 bits", "[muon][adam8]") {
  const auto values = random_parameters({{6, 5}, {70}}, at::kFloat);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{values[0]});
  groups.emplace_back(std::vector<Tensor>{values[1]},
                      std::make_unique<MuonOptions>(MuonOptions(0.02).orthogonalize(false).state_bits(8)));
  Muon muon(groups, MuonOptions(0.02).precision(MuonPrecision::fp32));
  Run adamw({values[1]}, in_8_bits(FusedAdamWOptions(0.02).weight_decay(MuonOptions().weight_decay())));
  for (int step = 0; step < 4; ++step) {
    set_random_gradients(values);
    adamw.parameters[0].mutable_grad() = values[1].grad().clone();
    muon.step(), adamw.optimizer.step();
  }
  CHECK(same_bits(values[1], adamw.parameters[0]));
}

TEST_CASE("a gradient that is not finite leaves the state alone with finite_check, and shows without it",
          "[fused_adam][adam8]") {
  for (const bool is_checked : {true, false}) {
    Run run(random_parameters({{100}}, at::kFloat),
            in_8_bits(FusedAdamWOptions(0.02).finite_check(is_checked)));
    run.step(2, 1);
    const auto before = snapshot(run.optimizer);
    Tensor gradient = torch::ones({100});
    gradient[40] = std::numeric_limits<float>::infinity();
    run.parameters[0].mutable_grad() = gradient;
    run.optimizer.step();
    auto after = snapshot(run.optimizer);
    after.parameters[0].gradient = before.parameters[0].gradient;
    CHECK(difference(before, after).empty() == is_checked);
    run.step(1, 2);
    const Tensor bad = run.parameters[0].isnan();
    CHECK(count_true(bad) == (is_checked ? 0 : 32));
    CHECK(count_true(bad.slice(0, 32, 64)) == (is_checked ? 0 : 32));
  }
}

}  // namespace pacer::testing
