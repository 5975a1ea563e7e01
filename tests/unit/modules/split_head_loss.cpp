// The loss behind a head that ranks share out by rows, beside torch's cross entropy of whole logits in fp64.
#include "support/catch.h"

#include <cmath>
#include <limits>

#include <pacer/modules/causal_lm.h>

#include "support/message_of.h"
#include "support/modules/split_head.h"

namespace pacer::testing {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::linear_cross_entropy;
using torch::Tensor;

// Where 41 columns are cut: also in two ranks of which one has none.
const std::vector<std::vector<int64_t>> kBounds = {
    {0, 41}, {0, 20, 41}, {0, 16, 32, 41}, {0, 0, 41}, {0, 41, 41}};

// Ranks with texts of their own, of whose rows different numbers are ignored.
std::vector<LossCase> cases_of(size_t ranks, const LinearCrossEntropyOptions& options, int64_t columns = 41,
                               int64_t in = 16) {
  std::vector<LossCase> cases;
  for (size_t r = 0; r < ranks; ++r) {
    LossCase of = loss_case(30, columns, in, options);
    torch::manual_seed(40 + static_cast<int64_t>(r));
    of.hidden = torch::randn_like(of.hidden);
    of.targets = torch::randint(columns, {3, 10});
    of.targets.view({-1}).narrow(0, 3, static_cast<int64_t>(5 * r)).fill_(options.ignore_index());
    cases.push_back(of);
  }
  return cases;
}

// The largest error of all ranks beside what they compute together with a whole weight in fp64.
double split_error(const std::vector<LossCase>& of_ranks, const std::vector<int64_t>& bounds, double scale) {
  const SplitPasses found = split_passes(of_ranks, bounds, std::vector<double>(of_ranks.size(), scale));
  REQUIRE(first_of(found.messages) == "");
  std::vector<LossPass> exact;
  Tensor of_weight;
  for (const LossCase& of : of_ranks) {
    exact.push_back(plain_pass(of.to(at::kCPU, at::kDouble), at::kDouble, scale));
    of_weight = of_weight.defined() ? of_weight + exact.back().weight : exact.back().weight;
  }
  double error = 0;
  for (size_t r = 0; r < of_ranks.size(); ++r) {
    exact[r].weight = of_weight.narrow(0, bounds[r], bounds[r + 1] - bounds[r]);
    if (exact[r].weight.numel() == 0) {
      CHECK(found.passes[r].weight.numel() == 0);
      exact[r].weight = torch::ones({1});
      error = std::max(error,
                       loss_error({found.passes[r].loss, found.passes[r].hidden, exact[r].weight}, exact[r]));
    } else {
      error = std::max(error, loss_error(found.passes[r], exact[r]));
    }
  }
  return error;
}

}  // namespace

TEST_CASE("a loss behind a head in parts is that of a whole one", "[modules][loss][split_head]") {
  for (const std::vector<int64_t>& bounds : kBounds) {
    for (const LinearCrossEntropyOptions& options :
         {LinearCrossEntropyOptions(), LinearCrossEntropyOptions().chunk_bytes(7 * 41 * 4),
          LinearCrossEntropyOptions().label_smoothing(0.2).z_loss(1e-3).ignore_index(3).chunk_bytes(1),
          LinearCrossEntropyOptions().soft_cap(2.5).label_smoothing(0.1)}) {
      CAPTURE(bounds, options.label_smoothing(), options.soft_cap());
      const auto of_ranks = cases_of(bounds.size() - 1, options);
      CHECK(split_error(of_ranks, bounds, 1) < 1e-6);  // sums in fp32 of 41 terms, and of 90 for the weight
      CHECK(split_error(of_ranks, bounds, 0.25) < 1e-6);
    }
  }
}

TEST_CASE("rows of a loss behind a head in parts have weights", "[modules][loss][split_head]") {
  auto of_ranks = cases_of(2, {});
  of_ranks[0].row_weights = torch::rand({3, 10}) * 3;
  CHECK(split_error(of_ranks, kBounds[1], 1) < 1e-6);  // on one rank alone, too
  of_ranks[1].row_weights = torch::rand({3, 10}) * 1e-3;
  CHECK(split_error(of_ranks, kBounds[1], 1) < 1e-6);
}

TEST_CASE("in 16 bits a head in parts is as exact as a whole one", "[modules][loss][split_head]") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (const int64_t chunk_bytes : {int64_t{1} << 20, int64_t{7 * 41 * 2}}) {
      std::vector<LossCase> of_ranks;
      double whole = 0;
      for (const LossCase& of : cases_of(3, LinearCrossEntropyOptions().chunk_bytes(chunk_bytes))) {
        of_ranks.push_back(of.to(at::kCPU, dtype));
        whole =
            std::max(whole, loss_error(fused_loss_pass(of_ranks.back()),
                                       plain_pass(of_ranks.back().to(at::kCPU, at::kDouble), at::kDouble)));
      }
      CAPTURE(dtype, chunk_bytes, whole);
      // Terms of the hidden states' gradients are rounded once more on each rank, and so are their sums.
      CHECK(split_error(of_ranks, kBounds[2], 1) < 2 * whole);
    }
  }
  std::vector<LossCase> in_8_bits;
  for (const LossCase& of : cases_of(2, LinearCrossEntropyOptions().fp8(true), 48, 32)) {
    in_8_bits.push_back(of.to(at::kCPU, at::kBFloat16));
  }
  const double error = split_error(in_8_bits, {0, 16, 48}, 1);
  CHECK(error > 0.01);
  CHECK(error < 0.1);
}

TEST_CASE("a head in parts without rows, without a gradient, and without a rank's rows",
          "[modules][loss][split_head]") {
  auto of_ranks = cases_of(2, {});
  const SplitPasses frozen = split_passes(of_ranks, kBounds[1], {1, 1}, /*is_trained=*/false);
  REQUIRE(first_of(frozen.messages) == "");
  CHECK_FALSE(frozen.passes[0].weight.defined());
  const auto exact = plain_pass(of_ranks[1].to(at::kCPU, at::kDouble), at::kDouble);
  CHECK(loss_error({frozen.passes[1].loss, frozen.passes[1].hidden, exact.weight}, exact) < 1e-6);

  of_ranks[0].targets.fill_(-100);  // all are ignored
  const SplitPasses found = split_passes(of_ranks, kBounds[1], {1, 1});
  REQUIRE(first_of(found.messages) == "");
  CHECK(std::isnan(found.passes[0].loss.item<double>()));
  CHECK(found.passes[0].hidden.count_nonzero().item<int64_t>() == 0);
  const LossPass other{found.passes[1].loss, found.passes[1].hidden,
                       torch::cat({found.passes[0].weight, found.passes[1].weight})};
  CHECK(loss_error(other, exact) < 1e-6);

  for (LossCase& of : of_ranks) {
    of.hidden = of.hidden.narrow(1, 0, 0);
    of.targets = of.targets.narrow(1, 0, 0);
  }
  const SplitPasses empty = split_passes(of_ranks, kBounds[1], {1, 1});
  REQUIRE(first_of(empty.messages) == "");
  CHECK(empty.passes[0].hidden.sizes() == torch::IntArrayRef({3, 0, 16}));
  CHECK(empty.passes[0].weight.count_nonzero().item<int64_t>() == 0);
}

TEST_CASE("what ranks do not do alike behind a head in parts is an error", "[modules][loss][split_head]") {
  auto of_ranks = cases_of(2, {});
  const auto scaled = split_passes(of_ranks, kBounds[1], {1, 2});
  CHECK_THAT(scaled.messages[0], ContainsSubstring("scaled by different numbers"));
  CHECK_THAT(scaled.messages[1], ContainsSubstring("scale them alike on all ranks"));
  of_ranks[1].hidden = of_ranks[1].hidden.narrow(1, 0, 9);
  of_ranks[1].targets = of_ranks[1].targets.narrow(1, 0, 9);
  const auto uneven = split_passes(of_ranks, kBounds[1], {1, 1});
  CHECK(uneven.messages[0] != "");
  CHECK(uneven.messages[1] != "");
  // The same sentences as of a whole head.
  OnlyHead head(torch::randn({41, 16}));
  const Tensor hidden = torch::randn({3, 16}), targets = torch::tensor({1, 2, 41});
  const std::string whole = message_of([&] { (void)linear_cross_entropy(hidden, head.weight, targets); });
  CHECK(message_of([&] { (void)head.head_loss(hidden, targets); }) == whole);
  const Ranks worlds = Communicator::in_process(1, {});
  head.head_exchange_slot()->exchange =
      std::make_shared<ThreadExchange>(worlds[0], head.weight, kBounds[0], true);
  CHECK(message_of([&] { (void)head.head_loss(hidden, targets); }) == whole);
}

TEST_CASE("without an exchange a head's loss is linear_cross_entropy, and a copy has none",
          "[modules][loss][split_head]") {
  const LossCase of = loss_case();
  OnlyHead head(of.weight);
  CHECK(head.head_loss(of.hidden, of.targets).equal(linear_cross_entropy(of.hidden, of.weight, of.targets)));
  const Ranks worlds = Communicator::in_process(1, {});
  const auto exchange = std::make_shared<ThreadExchange>(worlds[0], of.weight, kBounds[0], true);
  head.head_exchange_slot()->exchange = exchange;
  OnlyHead copied(head);
  CHECK(copied.head_exchange_slot()->exchange == nullptr);
  copied = head;
  CHECK(copied.head_exchange_slot()->exchange == nullptr);
  CHECK(head.head_exchange_slot()->exchange == exchange);
  modules::CausalLm model(modules::CausalLmOptions(8, 16, 1, 1));
  model->head_exchange_slot()->exchange = exchange;
  const auto clone = std::dynamic_pointer_cast<modules::CausalLmImpl>(model->clone());
  CHECK(clone->head_exchange_slot()->exchange == nullptr);
}

}  // namespace pacer::testing
