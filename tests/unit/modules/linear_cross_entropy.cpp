// linear_cross_entropy beside torch's cross entropy of whole logits in fp64.
#include "support/catch.h"

#include <cmath>

#include <torch/csrc/autograd/autograd.h>

#include "support/message_of.h"
#include "support/modules/autocast.h"
#include "support/modules/loss_passes.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::linear_cross_entropy;
using torch::Tensor;

LossPass exact_pass(const LossCase& of) { return plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble); }

const std::vector<LinearCrossEntropyOptions> kOptions = {
    {},
    LinearCrossEntropyOptions().label_smoothing(0.1),
    LinearCrossEntropyOptions().z_loss(1e-2),
    LinearCrossEntropyOptions().label_smoothing(0.2).z_loss(1e-3).ignore_index(3),
    LinearCrossEntropyOptions().soft_cap(2.5),
    LinearCrossEntropyOptions().soft_cap(4).label_smoothing(0.1).z_loss(1e-3),
};

// x in 8-bit floats times a power of two, as large as its largest magnitude allows.
Tensor in_8_bits(const Tensor& x) {
  const double scale = std::exp2(std::floor(std::log2(448 / x.abs().max().item<double>())));
  return (x.to(at::kFloat) * scale).to(at::kFloat8_e4m3fn).to(at::kDouble) / scale;
}

// What a loss in 8-bit floats is, restated in fp64.
LossPass restated_in_8_bits(const LossCase& of) {
  const Tensor x = in_8_bits(of.hidden).flatten(0, -2), w = in_8_bits(of.weight);
  const Tensor logits = at::mm(x, w.t()).to(of.hidden.scalar_type()).to(at::kDouble);
  const Tensor targets = of.targets.flatten(), counts = targets.ne(of.options.ignore_index());
  const Tensor gradient =
      (logits.softmax(1) - at::one_hot(targets.clamp_min(0), w.size(0))) * counts.unsqueeze(1);
  const Tensor of_hidden = (gradient * 256).to(at::kFloat).to(at::kFloat8_e5m2).to(at::kDouble) / 256;
  const Tensor of_weight = gradient.to(of.hidden.scalar_type()).to(at::kDouble);
  const Tensor loss =
      plain_loss(logits, at::eye(w.size(0), at::kDouble), targets, of.options, {}, at::kDouble);
  return {loss, at::mm(of_hidden, w).view_as(of.hidden) / counts.sum(),
          at::mm(of_weight.t(), of.hidden.flatten(0, -2).to(at::kDouble)) / counts.sum()};
}

}  // namespace

TEST_CASE("a loss without logits is torch's, whatever the size of a chunk", "[modules][loss]") {
  for (LinearCrossEntropyOptions options : kOptions) {
    // All rows at once; seven, so that the last chunk has two; one.
    for (const int64_t chunk_bytes : {int64_t{1} << 20, int64_t{7 * 41 * 4}, int64_t{1}}) {
      const LossCase of = loss_case(30, 41, 16, options.chunk_bytes(chunk_bytes));
      CAPTURE(options.label_smoothing(), options.z_loss(), options.ignore_index(), chunk_bytes);
      // fp32 sums of 41 terms, and of 30 for the weight.
      CHECK(loss_error(fused_loss_pass(of), exact_pass(of)) < 1e-6);
      CHECK(loss_error(fused_loss_pass(of, 3), plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble, 3)) <
            1e-6);
    }
  }
}

TEST_CASE("in 16 bits a loss without logits is as exact as one with them", "[modules][loss]") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    // The last one adds up 300 gradients of the weight, which 16 bits would lose.
    for (const int64_t chunk_bytes : {int64_t{1} << 20, int64_t{7 * 41 * 2}, int64_t{1}}) {
      LossCase of = loss_case(300).to(at::kCPU, dtype);
      of.options.chunk_bytes(chunk_bytes);
      CAPTURE(dtype, chunk_bytes);
      const LossPass exact = exact_pass(of), found = fused_loss_pass(of);
      CHECK(found.loss.scalar_type() == at::kFloat);
      CHECK(found.hidden.scalar_type() == dtype);
      CHECK(found.weight.scalar_type() == dtype);
      CHECK(loss_error(found, exact) < 1.2 * loss_error(plain_pass(of), exact));
    }
  }
}

TEST_CASE("rows of a loss without logits have weights", "[modules][loss]") {
  for (const LinearCrossEntropyOptions& options : kOptions) {
    LossCase of = loss_case(30, 41, 16, options);
    of.options.chunk_bytes(7 * 41 * 4);
    of.row_weights = torch::rand({3, 10}) * 3;
    of.row_weights[1][2] = 0;
    CAPTURE(options.soft_cap(), options.label_smoothing());
    CHECK(loss_error(fused_loss_pass(of), exact_pass(of)) < 1e-6);
    of.row_weights.fill_(0.125);  // the mean of all
    const LossPass alike = fused_loss_pass(of);
    of.row_weights.reset();
    CHECK(loss_error(alike, fused_loss_pass(of)) < 1e-6);
  }
}

TEST_CASE("a loss without logits computes in 8-bit floats where it is told to", "[modules][loss][fp8]") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t chunk_bytes : {int64_t{1} << 20, int64_t{7 * 48 * 2}}) {
      LossCase of = loss_case(60, 48, 32).to(at::kCPU, dtype);
      of.options.chunk_bytes(chunk_bytes).fp8(true);
      CAPTURE(dtype, chunk_bytes);
      const LossPass found = fused_loss_pass(of), restated = restated_in_8_bits(of);
      // Results are of 16 bits, and a code in a thousand lies where fp32 and fp64 round to different neighbours.
      CHECK(loss_error(found, restated) < (dtype == at::kHalf ? 1e-3 : 6e-3));
      CHECK_THAT(found.loss.item<double>(), Catch::Matchers::WithinRel(restated.loss.item<double>(), 1e-5));
      // Three bits of mantissa in what is multiplied, and two in what goes back.
      const double error = loss_error(found, exact_pass(of));
      CHECK(error < 0.1);
      CHECK(error > 0.01);
    }
  }
  LossCase of = loss_case(30, 48, 32).to(at::kCPU, at::kBFloat16);
  of.options.fp8(true);
  of.row_weights = torch::rand({3, 10}) * 3000;  // the mean does not see the factor, but codes end at 224
  CHECK(loss_error(fused_loss_pass(of), exact_pass(of)) < 0.1);
  of.row_weights.reset();
  of.targets.fill_(of.options.ignore_index());
  const LossPass ignored = fused_loss_pass(of);
  CHECK(torch::equal(ignored.hidden, torch::zeros_like(of.hidden)));
  of.hidden = torch::empty({3, 0, 32}, at::kBFloat16);
  of.targets = torch::empty({3, 0}, at::kLong);
  CHECK(fused_loss_pass(of).hidden.numel() == 0);
}

TEST_CASE("gradients of a loss without logits keep what fp16 cannot hold unscaled", "[modules][loss]") {
  // 1 / rows is below the smallest number of fp16 for a gradient of one part in a thousand.
  LossCase of = loss_case(6000, 8, 4).to(at::kCPU, at::kHalf);
  const LossPass found = fused_loss_pass(of, 65536);
  CHECK(loss_error(found, plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble, 65536)) < 5e-3);
}

TEST_CASE("under autocast a loss without logits computes in its dtype", "[modules][loss]") {
  const LossCase of = loss_case();
  const Autocast on(at::kCPU, at::kBFloat16);
  const LossPass found = fused_loss_pass(of), exact = exact_pass(of);
  CHECK(found.hidden.scalar_type() == at::kFloat);
  CHECK(found.weight.scalar_type() == at::kFloat);
  CHECK(loss_error(found, exact) < 1.2 * loss_error(plain_pass(of), exact));
}

TEST_CASE("a loss without logits makes the gradients that are asked for", "[modules][loss]") {
  const LossCase of = loss_case();
  const LossPass both = fused_loss_pass(of);
  const auto loss = [&](bool hidden_trains, bool weight_trains) {
    const Tensor hidden = of.hidden.clone().requires_grad_(hidden_trains);
    const Tensor weight = of.weight.clone().requires_grad_(weight_trains);
    const Tensor result = linear_cross_entropy(hidden, weight, of.targets);
    CHECK(torch::equal(result, both.loss));
    if (result.requires_grad()) result.backward();
    return std::pair(hidden.grad(), weight.grad());
  };
  CHECK(torch::equal(loss(true, false).first, both.hidden));
  CHECK_FALSE(loss(true, false).second.defined());
  CHECK(torch::equal(loss(false, true).second, both.weight));
  CHECK_FALSE(loss(false, false).first.defined());
  const torch::NoGradGuard no_grad;
  CHECK_FALSE(
      linear_cross_entropy(of.hidden.clone().requires_grad_(), of.weight, of.targets).requires_grad());
}

TEST_CASE("backward through a loss without logits can be repeated, and has no second derivative",
          "[modules][loss]") {
  const LossCase of = loss_case();
  const Tensor hidden = of.hidden.clone().requires_grad_();
  const Tensor loss = linear_cross_entropy(hidden, of.weight, of.targets);
  loss.backward({}, /*retain_graph=*/true);
  const Tensor once = hidden.grad().clone();
  loss.backward({}, /*retain_graph=*/true);
  CHECK(torch::equal(hidden.grad(), once * 2));
  CHECK_THAT(
      message_of([&] { (void)torch::autograd::grad({loss}, {hidden}, {}, true, /*create_graph=*/true); }),
      ContainsSubstring("second derivative"));
}

TEST_CASE("layouts, tied weights and rows that do not count", "[modules][loss]") {
  LossCase of = loss_case();
  const LossPass expected = fused_loss_pass(of);
  LossCase turned = of;
  turned.hidden = of.hidden.transpose(0, 1).contiguous().transpose(0, 1);
  turned.weight = of.weight.t().contiguous().t();
  turned.targets = of.targets.t().contiguous().t();
  CHECK(loss_error(fused_loss_pass(turned), expected) < 1e-6);
  // A vector is one row.
  const Tensor one = linear_cross_entropy(of.hidden[0][0], of.weight, of.targets[0][0]);
  CHECK(torch::allclose(one, plain_loss(of.hidden[0].narrow(0, 0, 1), of.weight,
                                        of.targets[0].narrow(0, 0, 1), {}, {}, at::kFloat)));
  of.targets.fill_(of.options.ignore_index());
  const LossPass ignored = fused_loss_pass(of), plain = plain_pass(of);
  CHECK(std::isnan(ignored.loss.item<double>()));
  CHECK(std::isnan(plain.loss.item<double>()));
  CHECK(torch::equal(ignored.hidden, plain.hidden));  // zeros
  CHECK(torch::equal(ignored.weight, plain.weight));
  LossCase empty = loss_case();
  empty.hidden = torch::empty({3, 0, 16});
  empty.targets = torch::empty({3, 0}, at::kLong);
  const LossPass of_nothing = fused_loss_pass(empty);
  CHECK(std::isnan(of_nothing.loss.item<double>()));
  CHECK(of_nothing.hidden.numel() == 0);
  CHECK(torch::equal(of_nothing.weight, torch::zeros_like(empty.weight)));
}

TEST_CASE("what a loss without logits cannot take is an error that says so", "[modules][loss]") {
  const LossCase of = loss_case();
  const auto message = [&](const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                           const LinearCrossEntropyOptions& options = {}, const Tensor& row_weights = {}) {
    return message_of([&] { (void)linear_cross_entropy(hidden, weight, targets, options, row_weights); });
  };
  using Options = LinearCrossEntropyOptions;
  CHECK_THAT(message(of.hidden, of.weight.narrow(1, 0, 3), of.targets),
             ContainsSubstring("hidden [..., in] and weight"));
  CHECK_THAT(message(of.hidden, of.weight[0], of.targets), ContainsSubstring("weight [columns, in]"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets.flatten()),
             ContainsSubstring("one for each row of hidden"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets.to(at::kInt)), ContainsSubstring("targets in Long"));
  CHECK_THAT(message(of.hidden, of.weight.to(at::kBFloat16), of.targets),
             ContainsSubstring("the same, not Float"));
  CHECK_THAT(message(of.hidden.to(at::kDouble), of.weight.to(at::kDouble), of.targets),
             ContainsSubstring("Float, BFloat16 or Half"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets.to(at::kMeta)), ContainsSubstring("on one device"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets + 1000), ContainsSubstring("columns 0 to 40"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().label_smoothing(1)),
             ContainsSubstring("[0, 1)"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().label_smoothing(std::nan(""))),
             ContainsSubstring("[0, 1)"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().z_loss(-1)), ContainsSubstring("z_loss"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().chunk_bytes(0)),
             ContainsSubstring("chunk_bytes"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().soft_cap(-1)),
             ContainsSubstring("soft_cap"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, Options().fp8(true)),
             ContainsSubstring("16 bits, not Float"));
  CHECK_THAT(message(of.hidden.to(at::kHalf), of.weight.to(at::kHalf), of.targets, Options().fp8(true)),
             ContainsSubstring("multiples of 16, not [41, 16]; pad the vocabulary"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, {}, torch::ones({30})),
             ContainsSubstring("one for each target [3, 10], not Float [30]"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, {}, torch::ones({3, 10}, at::kDouble)),
             ContainsSubstring("not Double"));
  CHECK_THAT(message(of.hidden, of.weight, of.targets, {}, torch::ones({3, 10}).requires_grad_()),
             ContainsSubstring("need no gradient"));
}

}  // namespace pacer::testing
