// What Muon refuses: parameters that are no matrices, options, and another rule for a group that has taken
// a step.
#include <pacer/optimizers/muon.h>

#include <torch/optim/adamw.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing {

template <>
struct Family<Muon> {
  using Options = MuonOptions;
  using ParamState = MuonParamState;
};

namespace muon_refusals {
namespace {

Tensor parameter(const std::vector<int64_t>& shape) {
  return random_parameters({shape}, at::kDouble).front();
}

}  // namespace

TEST_CASE("what cannot be a matrix of Muon is refused, by name, where the optimizer is made", "[muon]") {
  const auto refusal_of = [](const Tensor& p, const MuonOptions& options) {
    NamedParameters named;
    named.insert("layer.weight", p);
    return refusal([&] { Muon(named, options); });
  };
  CHECK(contains(refusal_of(parameter({7}), {}), "layer.weight"));
  CHECK(contains(refusal_of(parameter({7}), {}), "orthogonalize(false)"));
  CHECK(contains(refusal_of(parameter({}), {}), "no matrix"));
  CHECK(contains(refusal_of(parameter({0, 4}), {}), "no matrix"));
  CHECK(contains(refusal_of(parameter({7, 4}), MuonOptions().split(2)), "cannot be split into 2"));
  CHECK(contains(refusal_of(parameter({8, 4}), MuonOptions().split(0)), "split"));
  CHECK(contains(refusal_of(parameter({8, 4}), MuonOptions().ns_steps(0)), "ns_steps"));
  CHECK(contains(refusal_of(parameter({8, 4}), MuonOptions().momentum(1)), "momentum"));
  CHECK(contains(refusal_of(parameter({8, 4}), MuonOptions().row_beta(-0.1)), "row_beta"));
  CHECK(contains(refusal_of(parameter({8, 4}), MuonOptions().paged(Paging())), "paged"));
}

TEST_CASE("a group that Muon cannot orthogonalise is not added, and nothing else changes", "[muon]") {
  using torch::optim::OptimizerParamGroup;
  const Tensor p = parameter({4, 3}), gain = parameter({7});
  Muon optimizer({p});
  set_random_gradients({p});
  optimizer.step();
  const auto refuses = [&](const auto& group, const std::vector<std::string>& parts) {
    return unless_refused(optimizer, parts, [&] { optimizer.add_param_group(group); });
  };
  NamedParameters named;
  named.insert("norm.gain", gain);
  CHECK(refuses(NamedParamGroup(named), {"norm.gain", "orthogonalize(false)"}) == "");
  CHECK(refuses(OptimizerParamGroup({gain}), {"orthogonalize(false)"}) == "");
  CHECK(refuses(OptimizerParamGroup({parameter({0, 4})}), {"no matrix"}) == "");
  CHECK(
      refuses(OptimizerParamGroup({parameter({7, 4})}, std::make_unique<MuonOptions>(MuonOptions().split(2))),
              {"cannot be split into 2"}) == "");
  // The options of the first group are read in the next step only; these are torch's own.
  optimizer.param_groups()[0].set_options(std::make_unique<torch::optim::AdamWOptions>(0.1));
  optimizer.add_param_group(
      OptimizerParamGroup({gain}, std::make_unique<MuonOptions>(MuonOptions().orthogonalize(false))));
  CHECK(optimizer.parameter_name(gain) != "norm.gain");  // that name was refused with its group
  optimizer.param_groups()[0].set_options(std::make_unique<MuonOptions>());
  const Tensor before = gain.detach().clone();
  set_random_gradients({p, gain});
  optimizer.step();
  CHECK_FALSE(same_bits(before, gain.detach()));
}

TEST_CASE("options that no longer fit the parameters are refused in the next step", "[muon]") {
  const Tensor p = parameter({7}), q = parameter({9, 2});
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{p},
                      std::make_unique<MuonOptions>(MuonOptions().orthogonalize(false)));
  groups.emplace_back(std::vector<Tensor>{q}, std::make_unique<MuonOptions>(MuonOptions().split(3)));
  Muon optimizer(groups);
  const auto options = [&](size_t g) -> MuonOptions& {
    return static_cast<MuonOptions&>(optimizer.param_groups()[g].options());
  };
  set_random_gradients({p, q});
  options(0).orthogonalize(true);
  CHECK(unless_refused(optimizer, {"no matrix"}, [&] { optimizer.step(); }) == "");
  options(0).orthogonalize(false);
  options(1).split(2);
  CHECK(unless_refused(optimizer, {"cannot be split into 2"}, [&] { optimizer.step(); }) == "");
  options(1).split(9);
  optimizer.step();
}

TEST_CASE("a group keeps its rule once it has taken a step", "[muon]") {
  for (const bool first : {true, false}) {
    const Tensor p = parameter({4, 3});
    Muon optimizer({p}, MuonOptions().orthogonalize(first));
    set_random_gradients({p});
    optimizer.step();
    auto& options = static_cast<MuonOptions&>(optimizer.param_groups()[0].options());
    options.orthogonalize(!first);
    CHECK(contains(refusal([&] { optimizer.step(); }), first ? "Muon's" : "AdamW's"));
    options.orthogonalize(first);
    optimizer.step();
    options.orthogonalize(!first);
    optimizer.state().clear();
    optimizer.step();
  }
}

}  // namespace muon_refusals
}  // namespace pacer::testing
