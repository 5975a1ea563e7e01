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
};

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
                                        of.targets[0].narrow(0, 0, 1), {}, at::kFloat)));
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
                           const LinearCrossEntropyOptions& options = {}) {
    return message_of([&] { (void)linear_cross_entropy(hidden, weight, targets, options); });
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
}

}  // namespace pacer::testing
