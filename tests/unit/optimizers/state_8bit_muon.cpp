// Muon with state_bits(8): its momentum in codes against one in 32 bits and the rule, files, and what is refused.
#include "support/catch.h"

#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_muon.h>

#include "support/checkpoints/archives.h"
#include "support/optimizers/state_8bit.h"

namespace pacer::testing {

template <>
struct Family<Muon> {
  using Options = MuonOptions;
  using ParamState = MuonParamState;
};

namespace {

using MuonRun = StateRun<Muon>;

MuonOptions muon_options(int64_t bits = 8) {
  return MuonOptions(0.02).weight_decay(0.1).precision(MuonPrecision::fp32).state_bits(bits);
}

// Matrices of several sizes, of a memory order of their own, and convolutions.
std::vector<Tensor> matrices(at::ScalarType dtype) {
  torch::manual_seed(2);
  auto values = random_parameters({{7, 19}, {40, 50}, {40, 50}, {1, 5}, {4, 3, 2, 2}}, dtype);
  values.push_back(torch::randn({40, 3}).to(dtype).t().detach().requires_grad_());
  values.push_back(torch::randn({2, 3, 4, 5})
                       .to(dtype)
                       .contiguous(at::MemoryFormat::ChannelsLast)
                       .detach()
                       .requires_grad_());
  return values;
}

template <class MuonRun>
void for_every_mode(const MuonRun& run) {
  for (const Mode& mode : all_modes()) {
    if (mode.dtype == at::kDouble) continue;
    INFO(mode.name);
    run(mode);
  }
}

}  // namespace

TEST_CASE("Muon's momentum in 8 bits takes 1.0625 bytes a parameter", "[muon][adam8]") {
  for_every_mode([](const Mode& mode) {
    MuonRun run(random_parameters({{64, 32}}, mode.dtype), with_mode(muon_options(), mode));
    run.step(2, 1);
    CHECK(run.state().exp_avg().scalar_type() == at::kChar);
    CHECK(run.state().exp_avg().sizes() == at::IntArrayRef{64, 32});
    CHECK_FALSE(run.state().exp_avg_sq().defined());
    CHECK_FALSE(run.state().exp_avg_sq_scale().defined());
    const size_t bytes = run.state().exp_avg().nbytes() + run.state().exp_avg_scale().nbytes();
    CHECK(static_cast<double>(bytes) / run.parameters[0].numel() == 1.0625);
  });
}

TEST_CASE("Muon's first step in 8 bits is that in 32, which reads no momentum", "[muon][adam8]") {
  for_every_mode([](const Mode& mode) {
    MuonRun wide(matrices(mode.dtype), with_mode(muon_options(32), mode)),
        narrow(matrices(mode.dtype), with_mode(muon_options(), mode));
    wide.step(1, 3), narrow.step(1, 3);
    CHECK(same_bits(wide.parameters, narrow.parameters));
    wide.step(3, 4), narrow.step(3, 4);
    CHECK_FALSE(same_bits(wide.parameters, narrow.parameters));
  });
}

// One step at a time: an optimizer in 32 bits that is given the numbers of the codes takes the same step, but for the last
// bits of the decoded numbers, which products make larger. What is stored is half a code off at most, 1/127 of the
// scale where codes are coarsest, and 2^-11 for the scale.
TEST_CASE("Muon in 8 bits takes the step of its decoded momentum, and stores the new one", "[muon][adam8]") {
  const auto values = random_parameters({{24, 30}, {30, 24}, {5, 7}}, at::kFloat);
  for (const bool nesterov : {true, false}) {
    MuonRun run(values, muon_options().nesterov(nesterov));
    run.step(2, 1);
    for (int step = 0; step < 4; ++step) {
      StateRun<Muon> wide(run.parameters, muon_options(32).nesterov(nesterov));
      set_random_gradients(run.parameters, wide.parameters);
      std::vector<Tensor> wanted;
      for (size_t i = 0; i < values.size(); ++i) {
        auto state = std::make_unique<MuonParamState>();
        const Tensor m = decoded_moment(run.state(i).exp_avg(), run.state(i).exp_avg_scale(), false);
        state->step(run.state(i).step());
        state->exp_avg(m.to(at::kFloat));
        wide.optimizer.state()[wide.parameters[i].unsafeGetTensorImpl()] = std::move(state);
        wanted.push_back(0.95 * m + 0.05 * run.parameters[i].grad().to(at::kDouble));
      }
      run.optimizer.step(), wide.optimizer.step();
      CHECK(distance(run.parameters, wide.parameters) < 0.02 * 1e-4);
      for (size_t i = 0; i < values.size(); ++i) {
        const Tensor& scales = run.state(i).exp_avg_scale();
        const Tensor of_each = scales.to(at::kDouble)
                                   .repeat_interleave(32)
                                   .slice(0, 0, wanted[i].numel())
                                   .view(wanted[i].sizes());
        const Tensor found = decoded_moment(run.state(i).exp_avg(), scales, false);
        CHECK(count_true((found - wanted[i]).abs() > of_each * (1.0 / 127 + 0x1p-11 + 1e-6)) == 0);
      }
    }
  }
}

TEST_CASE("a gradient of zeros leaves a momentum of zeros in 8 bits, and decay alone", "[muon][adam8]") {
  MuonRun run({torch::full({6, 7}, 2.0f).requires_grad_(), torch::ones({3, 3}).requires_grad_()},
              muon_options());
  run.parameters[0].mutable_grad() = torch::zeros({6, 7});  // the other one sits out
  run.optimizer.step();
  CHECK(distance(run.parameters[0], torch::full({6, 7}, 2 * (1 - 0.02 * 0.1))) < 1e-6);
  CHECK(count_true(run.state().exp_avg() != 0) + count_true(run.state().exp_avg_scale() != 0) == 0);
  CHECK(run.parameters[1].detach().equal(torch::ones({3, 3})));
}

TEST_CASE("Muon's momentum in 8 bits resumes to the bit, by name and from an archive", "[muon][adam8]") {
  for_every_mode([](const Mode& mode) {
    const auto values = matrices(mode.dtype);
    const auto options = with_mode(muon_options().normalize_rows(true), mode);
    MuonRun unbroken(values, options), by_name(values, options), by_archive(values, options);
    unbroken.step(5, 1);
    by_name.optimizer.import_state(as_file(unbroken.optimizer.export_state()));
    load_from(by_archive.optimizer, saved(unbroken.optimizer));
    for (size_t i = 0; i < values.size(); ++i) {
      const torch::NoGradGuard no_grad;
      by_name.parameters[i].copy_(unbroken.parameters[i]);
      by_archive.parameters[i].copy_(unbroken.parameters[i]);
    }
    for (MuonRun* run : {&unbroken, &by_name, &by_archive}) run->step(4, 2);
    CHECK(difference(snapshot(unbroken.optimizer), snapshot(by_name.optimizer)).empty());
    CHECK(difference(snapshot(unbroken.optimizer), snapshot(by_archive.optimizer)).empty());
  });
}

TEST_CASE("a load converts Muon's momentum between 8 and 32 bits", "[muon][adam8]") {
  for (const int64_t from : {int64_t{8}, int64_t{32}}) {
    for (const bool by_name : {true, false}) {
      INFO("from " << from << " bits" << (by_name ? ", by name" : ", an archive"));
      MuonRun source(matrices(at::kFloat), muon_options(from));
      source.step(4, 1);
      MuonRun loaded(source.parameters, muon_options(40 - from));
      if (by_name) {
        loaded.optimizer.import_state(as_file(source.optimizer.export_state()));
      } else {
        load_from(loaded.optimizer, saved(source.optimizer));
      }
      CHECK(options_of(loaded.optimizer).state_bits() == 40 - from);
      options_of(source.optimizer).state_bits(40 - from);  // it converts in the same way
      source.step(3, 2), loaded.step(3, 2);
      CHECK(difference(snapshot(source.optimizer), snapshot(loaded.optimizer)).empty());
      CHECK(loaded.state().exp_avg_scale().defined() == (from == 32));
    }
  }
}

TEST_CASE("Muon's state in 8 bits that does not fit is refused and changes nothing", "[muon][adam8]") {
  const auto values = random_parameters({{5, 8}}, at::kFloat);
  MuonRun source(values, muon_options()), own(values, muon_options());
  source.step(2, 1), own.step(1, 2);
  const auto outcome = [&](const std::string& part, const std::string& key, const Tensor& tensor) {
    NamedTensors changed = as_file(source.optimizer.export_state());
    tensor.defined() ? (void)(changed[key] = tensor) : (void)changed.erase(key);
    return unless_refused(own.optimizer, {part}, [&] { own.optimizer.import_state(changed); });
  };
  CHECK(outcome("0.0/exp_avg_scale", "0.0/exp_avg_scale", Tensor()).empty());
  CHECK(outcome("[3]", "0.0/exp_avg_scale", torch::zeros({3}, at::kHalf)).empty());
  CHECK(outcome("Byte", "0.0/exp_avg", torch::zeros({5, 8}, at::kByte)).empty());
  CHECK(outcome("exp_avg_sq_scale", "0.0/exp_avg_sq_scale", torch::zeros({2}, at::kHalf)).empty());
}

TEST_CASE("each group of Muon has bits of its own, those of AdamW's rule, too", "[muon][adam8]") {
  const auto values = random_parameters({{12, 20}, {20, 12}, {70}}, at::kFloat);
  const auto of_vectors = MuonOptions(muon_options()).orthogonalize(false);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{values[0]});
  groups.emplace_back(std::vector<Tensor>{values[1]}, std::make_unique<MuonOptions>(muon_options(32)));
  groups.emplace_back(std::vector<Tensor>{values[2]}, std::make_unique<MuonOptions>(of_vectors));
  MuonRun narrow({values[0]}, muon_options()), wide({values[1]}, muon_options(32));
  StateRun<FusedAdamW> adamw({values[2]}, FusedAdamWOptions(0.02).weight_decay(0.1).state_bits(8));
  Muon muon(groups, muon_options());
  for (int step = 0; step < 4; ++step) {
    set_random_gradients(values);
    narrow.parameters[0].mutable_grad() = values[0].grad().clone();
    wide.parameters[0].mutable_grad() = values[1].grad().clone();
    adamw.parameters[0].mutable_grad() = values[2].grad().clone();
    muon.step(), narrow.optimizer.step(), wide.optimizer.step(), adamw.optimizer.step();
  }
  CHECK(same_bits(values[0], narrow.parameters[0]));
  CHECK(same_bits(values[1], wide.parameters[0]));
  CHECK(same_bits(values[2], adamw.parameters[0]));
}

TEST_CASE("what Muon does not have in 8 bits it refuses in a sentence", "[muon][adam8]") {
  const auto p = random_parameters({{4, 4}}, at::kFloat);
  const auto says = [](const auto& make, const std::string& part) { return contains(refusal(make), part); };
  CHECK(says([&] { Muon(p, muon_options(16)); }, "state_bits must be 8 or 32, not 16"));
  CHECK(says([&] { OneBitMuon(p, OneBitMuonOptions().state_bits(8)); }, "each rank's own stays in 32 bits"));
  MuonRun wide(random_parameters({{4, 4}}, at::kDouble), muon_options());
  CHECK(contains(refusal([&] { wide.step(1, 1); }), "is fp64"));
}

}  // namespace pacer::testing
