// Muon: its directions beside the singular value decomposition, and what it does with batches, pieces and
// groups. Its values over many steps, edits, layouts and dtypes are rows of the registry.
#include <pacer/modules/causal_lm.h>
#include <pacer/modules/embedding.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/muon.h>

#include <set>
#include <string>

#include <ATen/ops/linalg_svd.h>
#include <ATen/ops/linalg_svdvals.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::muon_optimizer {
namespace {

using torch::Tensor;

Tensor matrix(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble, uint64_t seed = 5) {
  torch::manual_seed(seed);
  return torch::randn(sizes, at::kDouble).to(dtype).requires_grad_();
}

void set_gradients(const std::vector<Tensor>& parameters, uint64_t step) {
  torch::manual_seed(100 + step);
  for (const Tensor& p : parameters) {
    p.mutable_grad() = torch::randn(p.sizes(), at::kDouble).to(p.scalar_type());
  }
}

// A step is the direction alone: no memory, no decay, a rate of 1.
MuonOptions bare() { return MuonOptions(1).momentum(0).nesterov(false).weight_decay(0); }

// U V^T of the decomposition.
Tensor nearest_orthogonal(const Tensor& values) {
  const auto [u, s, v] = at::linalg_svd(values.to(at::kDouble), /*full_matrices=*/false);
  return u.matmul(v);
}

double furthest(const Tensor& a, const Tensor& b) {
  return (a.detach().to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// What one step has taken off the parameter.
Tensor moved(Muon& optimizer, const Tensor& parameter) {
  const Tensor before = parameter.detach().clone();
  optimizer.step();
  return before - parameter.detach();
}

}  // namespace

TEST_CASE("Muon moves a matrix by the orthogonal matrix that is nearest to its gradient", "[muon]") {
  const auto exact = bare().ns_coefficients(MuonCoefficients::polar_express).ns_steps(12);
  const std::vector<std::vector<int64_t>> shapes = {{6, 4}, {4, 6}, {5, 5}, {1, 7}, {7, 1}, {4, 3, 2, 2}};
  for (const auto& shape : shapes) {
    CAPTURE(shape);
    const Tensor p = matrix(shape);
    set_gradients({p}, 0);
    const double rows = static_cast<double>(p.size(0)), columns = static_cast<double>(p.numel()) / rows;
    const Tensor wanted = nearest_orthogonal(p.grad().view({p.size(0), -1})).view_as(p);
    Muon as_adamw({p}, exact);
    CHECK(furthest(moved(as_adamw, p), wanted * 0.2 * std::sqrt(std::max(rows, columns))) < 1e-9);
    Muon as_jordan({p}, MuonOptions(exact).adjust_lr_fn(MuonAdjustment::original));
    CHECK(furthest(moved(as_jordan, p), wanted * std::sqrt(std::max(1.0, rows / columns))) < 1e-9);
  }
}

TEST_CASE("five quintic iterations bring singular values near 1, in every precision", "[muon]") {
  for (const auto precision : {MuonPrecision::fp32, MuonPrecision::bf16}) {
    const Tensor p = matrix({48, 32}, at::kFloat);
    set_gradients({p}, 0);
    Muon optimizer({p}, bare().precision(precision).adjust_lr_fn(MuonAdjustment::original));
    const Tensor step = moved(optimizer, p) / std::sqrt(1.5);
    const Tensor values = at::linalg_svdvals(step);
    CHECK(values.min().item<double>() > 0.3);
    CHECK(values.max().item<double>() < 1.3);
    // Its singular vectors are those of the gradient: U^T step V is diagonal, within bf16's rounding.
    const auto [u, s, v] = at::linalg_svd(p.grad(), /*full_matrices=*/false);
    const Tensor inside = u.transpose(0, 1).matmul(step).matmul(v.transpose(0, 1));
    CHECK((inside - torch::diag(inside.diag())).abs().max().item<double>() <
          (precision == MuonPrecision::bf16 ? 0.05 : 1e-3));
  }
}

TEST_CASE("Muon's momentum and decay are those of torch.optim.Muon", "[muon]") {
  // With one column there is nothing to orthogonalise but the length: every step is known in closed form.
  for (const bool nesterov : {false, true}) {
    const Tensor p = matrix({9, 1});
    Tensor wanted = p.detach().clone(), m = torch::zeros_like(wanted);
    Muon optimizer({p}, MuonOptions(0.1)
                            .momentum(0.9)
                            .nesterov(nesterov)
                            .weight_decay(0.3)
                            .ns_coefficients(MuonCoefficients::polar_express)
                            .ns_steps(12));
    for (uint64_t step = 0; step < 10; ++step) {
      set_gradients({p}, step);
      optimizer.step();
      m = 0.9 * m + 0.1 * p.grad();
      const Tensor u = nesterov ? 0.1 * p.grad() + 0.9 * m : m;
      wanted = wanted * (1 - 0.1 * 0.3) - 0.1 * 0.2 * 3 * u / u.norm();
    }
    CHECK(furthest(p, wanted) < 1e-9);
  }
}

TEST_CASE("a split matrix moves as its pieces would, and a batch as its matrices alone", "[muon]") {
  const Tensor whole = matrix({12, 5});
  std::vector<Tensor> pieces, alone;
  for (const Tensor& piece : whole.detach().chunk(3)) pieces.push_back(piece.clone().requires_grad_());
  for (const Tensor& piece : pieces) alone.push_back(piece.detach().clone().requires_grad_());
  Muon split({whole}, MuonOptions(0.1).split(3)), together(pieces, MuonOptions(0.1));
  std::vector<std::unique_ptr<Muon>> singly;
  for (const Tensor& one : alone) {
    singly.push_back(std::make_unique<Muon>(std::vector<Tensor>{one}, MuonOptions(0.1)));
  }
  for (uint64_t step = 0; step < 5; ++step) {
    set_gradients({whole}, step);
    for (size_t i = 0; i < 3; ++i) {
      const Tensor gradient = whole.grad().chunk(3)[i];
      pieces[i].mutable_grad() = gradient.clone();
      alone[i].mutable_grad() = gradient.clone();
    }
    if (step == 2) {  // one sits a step out
      whole.mutable_grad() = Tensor();
      pieces[1].mutable_grad() = Tensor(), alone[1].mutable_grad() = Tensor();
    }
    if (step != 2) split.step();
    together.step();
    for (auto& optimizer : singly) optimizer->step();
    if (step < 2) CHECK(furthest(whole, torch::cat(pieces)) < 1e-12);
    for (size_t i = 0; i < 3; ++i) CHECK(furthest(pieces[i], alone[i].detach()) < 1e-12);
  }
}

TEST_CASE("NorMuon divides rows by the root of their mean squares, and keeps the norm", "[muon]") {
  for (const int64_t split : {1, 2}) {
    for (const auto adjustment : {MuonAdjustment::original, MuonAdjustment::match_rms_adamw}) {
      CAPTURE(split, adjustment);
      const Tensor p = matrix({6, 4}), sits_out = matrix({6, 4}, at::kDouble, 6);
      const auto options =
          MuonOptions(0.1).weight_decay(0).row_beta(0.7).adjust_lr_fn(adjustment).split(split);
      // The same without, for the directions.
      const Tensor plain = p.detach().clone().requires_grad_();
      Muon normalizing({p, sits_out}, MuonOptions(options).normalize_rows(true)), other({plain}, options);
      Tensor moment = torch::zeros({6, 1}, at::kDouble);
      double scale = adjustment == MuonAdjustment::original ? std::sqrt(std::max(1.0, 6.0 / 4 / split)) : 0.4;
      if (adjustment == MuonAdjustment::match_rms_adamw && split == 1) scale = 0.2 * std::sqrt(6.0);
      for (uint64_t step = 0; step < 6; ++step) {
        set_gradients({p}, step), set_gradients({plain}, step);
        const Tensor direction = moved(other, plain) / (0.1 * scale);
        moment = 0.7 * moment + 0.3 * direction.square().mean(1, /*keepdim=*/true);
        std::vector<Tensor> pieces;
        const Tensor divided = direction / moment.sqrt();
        for (int64_t piece = 0; piece < split; ++piece) {
          const Tensor before = direction.chunk(split)[piece], after = divided.chunk(split)[piece];
          pieces.push_back(after * (before.norm() / after.norm()));
        }
        const Tensor step_of = moved(normalizing, p);
        CHECK(furthest(step_of, torch::cat(pieces) * (0.1 * scale)) < 1e-9);
        CHECK(std::abs(step_of.norm().item<double>() / (direction.norm().item<double>() * 0.1 * scale) - 1) <
              1e-9);
      }
      const auto& state =
          static_cast<const MuonParamState&>(*normalizing.state().at(p.unsafeGetTensorImpl()));
      CHECK(furthest(state.row_moment(), moment.view({6})) < 1e-9);
      CHECK(normalizing.state().count(sits_out.unsafeGetTensorImpl()) == 0);
    }
  }
}

TEST_CASE("rows of zeros stay zeros, and a skipped step changes no row's moment", "[muon]") {
  const Tensor p = matrix({4, 3}, at::kFloat);
  Muon optimizer({p}, MuonOptions(0.1).weight_decay(0).normalize_rows(true).finite_check(true));
  set_gradients({p}, 0);
  p.grad()[1].zero_();
  const Tensor step = moved(optimizer, p);
  CHECK(step[1].abs().max().item<double>() == 0);
  CHECK(step.isfinite().all().item<bool>());
  const auto& state = static_cast<const MuonParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
  const Tensor before = state.row_moment().clone();
  p.grad()[0][0] = NAN;
  CHECK(moved(optimizer, p).abs().max().item<double>() == 0);
  CHECK(same_bits(before, state.row_moment()));
  p.grad().zero_();
  CHECK(moved(optimizer, p).isfinite().all().item<bool>());
}

TEST_CASE("row moments come and go with the option", "[muon]") {
  const Tensor p = matrix({4, 3});
  Muon optimizer({p}, MuonOptions(0.1).normalize_rows(true));
  auto& options = static_cast<MuonOptions&>(optimizer.param_groups()[0].options());
  const auto rows = [&] {
    set_gradients({p}, 0);
    optimizer.step();
    const auto& state = static_cast<const MuonParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
    return state.row_moment().defined();
  };
  CHECK(rows());
  options.normalize_rows(false);
  CHECK_FALSE(rows());
  options.normalize_rows(true);
  CHECK(rows());
}

TEST_CASE("cautious decay spares the weights that a step moves away from zero", "[muon]") {
  for (const bool cautious : {false, true}) {
    const Tensor p = matrix({6, 4}), before = p.detach().clone();
    const Tensor plain = before.clone().requires_grad_();
    const auto options = MuonOptions(0.1).weight_decay(0);
    Muon decaying({p}, MuonOptions(options).weight_decay(0.5).cautious_decay(cautious)),
        other({plain}, options);
    set_gradients({p}, 0), set_gradients({plain}, 0);
    const Tensor direction = moved(other, plain);
    const Tensor decays = cautious ? (direction * before >= 0).to(at::kDouble) : torch::ones_like(before);
    CHECK(furthest(moved(decaying, p), direction + 0.1 * 0.5 * before * decays) < 1e-12);
    CHECK((!cautious || (decays.sum().item<double>() > 0 && decays.sum().item<double>() < 24)));
  }
}

TEST_CASE("a gradient that is not finite spoils its own matrix only", "[muon]") {
  const std::vector<Tensor> parameters = {matrix({4, 3}), matrix({4, 3}, at::kDouble, 6)};
  set_gradients(parameters, 0);
  parameters[0].grad()[0][0] = NAN;
  Muon optimizer(parameters);
  optimizer.step();
  CHECK(parameters[0].isnan().any().item<bool>());
  CHECK_FALSE(parameters[1].isnan().any().item<bool>());
}

TEST_CASE("what is no matrix takes AdamW's steps inside Muon, to the bit", "[muon]") {
  const Tensor p = matrix({8, 5}, at::kFloat), q = p.detach().clone().requires_grad_();
  const auto options = FusedAdamWOptions(0.01).betas({0.8, 0.95}).weight_decay(0.2);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{matrix({3, 3}, at::kFloat)}, std::make_unique<MuonOptions>());
  groups.emplace_back(std::vector<Tensor>{p}, std::make_unique<FusedAdamWOptions>(options));
  Muon muon(groups);
  FusedAdamW adamw({q}, options);
  for (uint64_t step = 0; step < 5; ++step) {
    set_gradients({p}, step), set_gradients({q}, step);
    muon.step();
    adamw.step();
  }
  CHECK(same_bits(p, q));
  CHECK(muon.param_groups()[0].params()[0].grad().defined() == false);
}

TEST_CASE("the head of a model that tells it goes to AdamW, tied or not", "[muon][causal_lm]") {
  for (const bool tied : {false, true}) {
    const modules::CausalLm model(modules::CausalLmOptions(32, 16, 1, 2).tied(tied));
    const auto groups = muon_groups(*model);
    REQUIRE(groups.size() == 2);
    std::set<std::string> matrices;
    for (const auto& item : groups[0].parameters) matrices.insert(item.key());
    CAPTURE(tied);
    CHECK(matrices == std::set<std::string>{"layers.0.qkv.linear.weight", "layers.0.projection.weight",
                                            "layers.0.mlp.fc1.weight", "layers.0.mlp.fc2.weight"});
  }
}

TEST_CASE("the parameters of a model are sorted into matrices and the rest", "[muon]") {
  torch::nn::Sequential model(torch::nn::Embedding(10, 4), torch::nn::Linear(4, 6),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})), torch::nn::Linear(6, 6),
                              torch::nn::Linear(6, 10));
  model[3]->as<torch::nn::Linear>()->bias.requires_grad_(false);
  auto groups = muon_groups(*model, MuonOptions(0.02), {"3."});
  CHECK(describe_muon_groups(groups) ==
        "Muon: 1.weight\nAdamW: 0.weight 1.bias 2.weight 2.bias 3.weight 4.weight 4.bias\n");
  CHECK(describe_muon_groups(muon_groups(*model)) ==
        "Muon: 1.weight 3.weight\nAdamW: 0.weight 1.bias 2.weight 2.bias 4.weight 4.bias\n");
  Muon optimizer(groups);
  CHECK(optimizer.param_groups()[0].options().get_lr() == 0.02);
  CHECK(optimizer.parameter_name(model[1]->as<torch::nn::Linear>()->weight) == "1.weight");
  torch::nn::Sequential with_pacers(modules::Embedding(10, 4), torch::nn::Linear(4, 6),
                                    torch::nn::Linear(6, 10));
  CHECK(describe_muon_groups(muon_groups(*with_pacers)) ==
        "Muon: 1.weight\nAdamW: 0.weight 1.bias 2.weight 2.bias\n");
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6}));
  groups = muon_groups(*norm);
  CHECK(groups.size() == 1);
}

}  // namespace pacer::testing::muon_optimizer
