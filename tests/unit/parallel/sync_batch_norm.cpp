// SyncBatchNorm on threads as ranks against torch::nn::BatchNorm2d on the whole batch: values, gradients, running
// statistics, what is refused, and what the other ranks hear of it.
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/types.h>

#include <pacer/modules/recompute.h>
#include <pacer/modules/sync_batch_norm.h>
#include <pacer/parallel/convert_sync_batch_norm.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::sync_batch_norm {
namespace {

using Catch::Matchers::ContainsSubstring;
using modules::SyncBatchNorm;
using torch::nn::BatchNormOptions;
using Counts = std::vector<int64_t>;

constexpr int64_t kChannels = 3;

// Of this shape behind the rows: about 2 + c with deviations of about 1 + c / 2 in channel c, so that no two
// channels, and no two rows, are alike.
Tensor batch(int64_t rows, const std::vector<int64_t>& trailing, int64_t seed) {
  std::vector<int64_t> sizes = {rows, kChannels};
  sizes.insert(sizes.end(), trailing.begin(), trailing.end());
  std::vector<int64_t> beside(sizes.size(), 1);
  beside[1] = kChannels;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  const Tensor channel = torch::arange(kChannels, torch::kDouble).view(beside);
  return torch::randn(sizes, generator, torch::kDouble) * (1 + channel / 2) + 2 + channel;
}

template <class Norm>
void give_values(Norm& norm) {
  const torch::NoGradGuard no_grad;
  if (!norm->weight.defined()) return;
  norm->weight.copy_(torch::linspace(0.5, 1.5, kChannels));
  norm->bias.copy_(torch::linspace(-1, 1, kChannels));
}

// What two passes made of a norm, its input and a gradient of its result.
struct Outcome {
  Tensor y, dx, dweight, dbias, mean, variance, batches;
};

template <class Norm>
Outcome pass_twice(Norm& norm, const Tensor& x, const Tensor& dy) {
  Outcome outcome;
  for (int i = 0; i < 2; ++i) {
    const Tensor leaf = torch::empty_strided(x.sizes(), x.strides(), x.options());  // as x lies in memory
    leaf.copy_(x * (1 + i)).requires_grad_();
    outcome.y = norm->forward(leaf);
    outcome.y.backward(dy.to(outcome.y.scalar_type()));
    outcome.dx = leaf.grad();
  }
  if (norm->weight.defined()) outcome.dweight = norm->weight.grad(), outcome.dbias = norm->bias.grad();
  if (norm->running_mean.defined()) {
    outcome.mean = norm->running_mean, outcome.variance = norm->running_var;
    outcome.batches = norm->num_batches_tracked;
  }
  return outcome;
}

// One process with the whole batch.
Outcome reference(const BatchNormOptions& options, const Tensor& x, const Tensor& dy) {
  torch::nn::BatchNorm2d norm(options);
  norm->to(torch::kDouble);
  give_values(norm);
  const auto flat = [](const Tensor& t) {
    return t.to(torch::kDouble).reshape({t.size(0), kChannels, -1, 1});
  };
  Outcome outcome = pass_twice(norm, flat(x), flat(dy));
  outcome.y = outcome.y.view(x.sizes());
  outcome.dx = outcome.dx.view(x.sizes());
  return outcome;
}

// Ranks with so many rows each; `prepare` makes a rank's input of its rows.
template <class Prepare>
std::vector<Outcome> on_ranks(const BatchNormOptions& options, const Tensor& x, const Tensor& dy,
                              const Counts& rows, const Prepare& prepare) {
  std::vector<Outcome> outcomes(rows.size());
  const auto worlds = Communicator::in_process(static_cast<int>(rows.size()));
  const auto messages = run_ranks(static_cast<int>(rows.size()), [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    int64_t first = 0;
    for (size_t before = 0; before < r; ++before) first += rows[before];
    SyncBatchNorm norm(options);
    const Tensor own = prepare(x.narrow(0, first, rows[r]).clone());
    norm->to(own.scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat);
    give_values(norm);
    convert_sync_batch_norm(*norm, worlds[r]);
    outcomes[r] = pass_twice(norm, own, dy.narrow(0, first, rows[r]));
  });
  REQUIRE(first_of(messages) == "");
  return outcomes;
}

// The largest difference between what ranks have and what one process has.
struct Difference {
  double y = 0, dx = 0, parameters = 0, statistics = 0;
};

double largest(const Tensor& a, const Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(torch::kDouble) - b.to(torch::kDouble)).abs().max().item<double>();
}

Difference difference(const std::vector<Outcome>& ranks, const Outcome& whole) {
  std::vector<Tensor> y, dx;
  Tensor dweight = torch::zeros({kChannels}, torch::kDouble), dbias = dweight.clone();
  Difference found;
  for (const Outcome& rank : ranks) {
    y.push_back(rank.y.to(torch::kDouble));
    dx.push_back(rank.dx.to(torch::kDouble));
    if (rank.dweight.defined()) dweight += rank.dweight, dbias += rank.dbias;
    if (!rank.mean.defined()) continue;
    CHECK(rank.mean.equal(ranks[0].mean));  // to the bit, or replicas drift apart
    CHECK(rank.variance.equal(ranks[0].variance));
    CHECK(rank.batches.item<int64_t>() == 2);
    found.statistics =
        std::max({found.statistics, largest(rank.mean, whole.mean), largest(rank.variance, whole.variance)});
  }
  found.y = largest(torch::cat(y), whole.y);
  found.dx = largest(torch::cat(dx), whole.dx);
  if (whole.dweight.defined()) {
    found.parameters = std::max(largest(dweight, whole.dweight), largest(dbias, whole.dbias));
  }
  return found;
}

const auto as_it_is = [](const Tensor& x) { return x; };

// Ranks that do the same, which fail with the words that run_ranks returns.
template <class F>
std::vector<std::string> failures(int ranks, const F& f) {
  const auto worlds = Communicator::in_process(ranks);
  return run_ranks(ranks, [&](int rank) {
    SyncBatchNorm norm(kChannels);
    convert_sync_batch_norm(*norm, worlds[static_cast<size_t>(rank)]);
    f(rank, norm);
  });
}

}  // namespace

TEST_CASE("ranks normalise their rows as one process normalises the whole batch", "[sync_batch_norm]") {
  const Counts rows = GENERATE(Counts{4, 4}, Counts{5, 1, 3}, Counts{0, 4, 2}, Counts{3, 0});
  const std::vector<int64_t> trailing =
      GENERATE(std::vector<int64_t>{}, std::vector<int64_t>{7}, std::vector<int64_t>{3, 4},
               std::vector<int64_t>{2, 3, 2}, std::vector<int64_t>{2, 1, 3, 2});
  const BatchNormOptions options =
      GENERATE(BatchNormOptions(kChannels), BatchNormOptions(kChannels).momentum(std::nullopt).eps(0.1),
               BatchNormOptions(kChannels).affine(false).momentum(0.3),
               BatchNormOptions(kChannels).track_running_stats(false));
  int64_t all = 0;
  for (const int64_t count : rows) all += count;
  const Tensor x = batch(all, trailing, 1), dy = batch(all, trailing, 2) - 2;
  const Difference found = difference(on_ranks(options, x, dy, rows, as_it_is), reference(options, x, dy));
  // In fp64: sums of at most 108 terms of at most 30, so errors of some 2^-53 * 3000 before the rest.
  CHECK(found.y < 1e-12);
  CHECK(found.dx < 1e-12);
  CHECK(found.parameters < 1e-11);
  CHECK(found.statistics < 1e-12);
}

TEST_CASE("inputs of 16 and 32 bits have statistics in fp32 and keep dtype and memory order",
          "[sync_batch_norm]") {
  struct Type {
    at::ScalarType dtype;
    double rounding;  // the largest relative error of a number
  };
  const Type type =
      GENERATE(Type{torch::kFloat, 6e-8}, Type{torch::kBFloat16, 4e-3}, Type{torch::kHalf, 5e-4});
  const bool channels_last = GENERATE(false, true);
  const BatchNormOptions options(kChannels);
  const auto format = channels_last ? torch::MemoryFormat::ChannelsLast : torch::MemoryFormat::Contiguous;
  // Input and gradients are rounded once, so that the reference has the same ones.
  const Tensor x = batch(7, {4, 5}, 3).to(type.dtype).to(torch::kDouble);
  const Tensor dy = (batch(7, {4, 5}, 4) - 2).to(type.dtype).to(torch::kDouble);
  const auto outcomes = on_ranks(options, x, dy, {4, 0, 3},
                                 [&](const Tensor& own) { return own.to(type.dtype).contiguous(format); });
  const Difference found = difference(outcomes, reference(options, x, dy));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.y.scalar_type() == type.dtype);
    CHECK(outcome.dx.scalar_type() == type.dtype);
    CHECK(outcome.y.is_contiguous(format));
    CHECK(outcome.dx.is_contiguous(format));
    CHECK(outcome.mean.scalar_type() == torch::kFloat);
  }
  // Results are at most 8, and rounded to the dtype; what comes before them is rounded to fp32 some ten times, of
  // numbers that are at most 30 deviations. Gradients of parameters are sums of 140 such numbers.
  CHECK(found.y < 8 * type.rounding + 2e-5);
  CHECK(found.dx < 8 * type.rounding + 2e-5);
  CHECK(found.parameters < 2e-3);
  CHECK(found.statistics < 2e-5);
}

TEST_CASE("an input that is a part of a larger tensor is normalised as its copy", "[sync_batch_norm]") {
  const BatchNormOptions options(kChannels);
  const Tensor x = batch(6, {4, 5}, 13), dy = batch(6, {4, 5}, 14) - 2;
  const auto part_of_larger = [](const Tensor& own) {
    Tensor larger = torch::zeros({own.size(0), kChannels + 2, 4, 7}, torch::kDouble);
    larger = larger.contiguous(torch::MemoryFormat::ChannelsLast).narrow(1, 1, kChannels).narrow(3, 1, 5);
    larger.copy_(own);
    return larger;
  };
  const Difference found =
      difference(on_ranks(options, x, dy, {4, 2}, part_of_larger), reference(options, x, dy));
  CHECK(found.y < 1e-12);
  CHECK(found.dx < 1e-12);
  CHECK(found.parameters < 1e-11);
}

TEST_CASE("in eval(), and with one rank, it is torch's batch norm to the bit", "[sync_batch_norm]") {
  const Tensor x = batch(6, {2, 2}, 5).to(torch::kFloat), dy = batch(6, {2, 2}, 6).to(torch::kFloat);
  const auto alone = Communicator::alone(torch::kCPU);
  for (const bool trains : {true, false}) {
    SyncBatchNorm norm(kChannels);
    torch::nn::BatchNorm2d peer(kChannels);
    give_values(norm), give_values(peer);
    convert_sync_batch_norm(*norm, alone);
    norm->train(trains), peer->train(trains);
    const Outcome own = pass_twice(norm, x, dy), torchs = pass_twice(peer, x, dy);
    CHECK(own.y.equal(torchs.y));
    CHECK(own.dx.equal(torchs.dx));
    CHECK(own.dweight.equal(torchs.dweight));
    CHECK(own.mean.equal(torchs.mean));
    CHECK(own.variance.equal(torchs.variance));
    CHECK(own.batches.equal(torchs.batches));
  }
}

TEST_CASE("in eval() a rank asks no other, with running statistics or without", "[sync_batch_norm]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    SyncBatchNorm tracked(kChannels), untracked(BatchNormOptions(kChannels).track_running_stats(false));
    for (auto norm : {tracked, untracked}) convert_sync_batch_norm(*norm, worlds[static_cast<size_t>(rank)]);
    tracked->eval(), untracked->eval();
    if (rank == 1) return;
    const Tensor x = batch(4, {2}, 7).to(torch::kFloat);
    RANK_REQUIRE(tracked(x).allclose(x, 1e-4, 1e-4));
    RANK_REQUIRE(untracked(x).mean(at::IntArrayRef{0, 2}).abs().max().item<double>() < 1e-5);
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("a pass without gradients in train() moves running statistics on all ranks", "[sync_batch_norm]") {
  std::vector<Tensor> means(2);
  const auto messages = failures(2, [&](int rank, SyncBatchNorm& norm) {
    const torch::NoGradGuard no_grad;
    const Tensor y = norm(torch::full({2, kChannels}, rank == 0 ? 0.0 : 4.0));
    RANK_REQUIRE(!y.requires_grad());
    means[static_cast<size_t>(rank)] = norm->running_mean;
  });
  REQUIRE(first_of(messages) == "");
  for (const Tensor& mean : means) CHECK(mean.allclose(torch::full({kChannels}, 0.2)));  // 0.1 of 2
}

TEST_CASE("what a layer sends is one all-gather forward and one all-reduce back, in a lane of its own",
          "[sync_batch_norm]") {
  const auto worlds = Communicator::in_process(2);
  std::vector<Traffic> gathers, reduces;
  const bool needs_dx = GENERATE(true, false);
  const auto messages = run_ranks(2, [&](int rank) {
    const auto& world = worlds[static_cast<size_t>(rank)];
    SyncBatchNorm norm(kChannels);
    convert_sync_batch_norm(*norm, world);
    norm(torch::ones({2, kChannels}).requires_grad_(needs_dx)).sum().backward();
    RANK_REQUIRE(norm->bias.grad().eq(2).all().item<bool>());
  });
  REQUIRE(first_of(messages) == "");
  for (const auto& world : worlds) {
    CHECK(traffic_of(*world, "all_gather").calls == 1);
    CHECK(traffic_of(*world, "all_gather").bytes_sent == 8 * (2 * kChannels + 1));
    CHECK(traffic_of(*world, "all_reduce").calls == (needs_dx ? 1 : 0));  // who asks for no dx needs no sums
    for (const Traffic& traffic : world->traffic()) {
      if (traffic.operation != "agreement") CHECK(traffic.group == "lane batch norm");
    }
  }
}

TEST_CASE("a recomputed batch norm moves its running statistics once and has the same gradients",
          "[sync_batch_norm][recompute]") {
  std::vector<Outcome> plain(2), again(2);
  const auto messages = failures(2, [&](int rank, SyncBatchNorm& norm) {
    const auto r = static_cast<size_t>(rank);
    const Tensor x = batch(4, {3}, 8 + rank).to(torch::kFloat),
                 dy = batch(4, {3}, 10 + rank).to(torch::kFloat);
    SyncBatchNorm other(std::dynamic_pointer_cast<modules::SyncBatchNormImpl>(norm->clone()));
    plain[r] = pass_twice(norm, x, dy);
    // The layer twice in a region, so that the second run has two statistics to find.
    struct TwiceImpl : torch::nn::Module {
      explicit TwiceImpl(SyncBatchNorm its) : norm(register_module("norm", std::move(its))) {}
      Tensor forward(const Tensor& x) { return norm(norm(x)); }
      SyncBatchNorm norm;
    };
    const auto twice = std::make_shared<TwiceImpl>(other);
    Tensor leaf = x.clone().requires_grad_();
    twice->forward(leaf).backward(dy);
    const Tensor dx = leaf.grad().clone(), dweight = other->weight.grad().clone();
    const Tensor mean = other->running_mean.clone();
    other->reset_running_stats();
    other->weight.mutable_grad().zero_();
    leaf = x.clone().requires_grad_();
    recompute(*twice, &TwiceImpl::forward, leaf).backward(dy);
    RANK_REQUIRE(leaf.grad().equal(dx));
    RANK_REQUIRE(other->weight.grad().equal(dweight));
    RANK_REQUIRE(other->running_mean.equal(mean));
    RANK_REQUIRE(other->num_batches_tracked.item<int64_t>() == 2);
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("a clone of a batch norm has its ranks, its values and what is frozen", "[sync_batch_norm]") {
  const auto messages = failures(2, [&](int rank, SyncBatchNorm& norm) {
    give_values(norm);
    norm->weight.requires_grad_(false);
    const auto clone = std::dynamic_pointer_cast<modules::SyncBatchNormImpl>(norm->clone());
    RANK_REQUIRE(clone->exchange() == norm->exchange());
    RANK_REQUIRE(clone->weight.equal(norm->weight) && !clone->weight.is_same(norm->weight));
    RANK_REQUIRE(!clone->weight.requires_grad() && clone->bias.requires_grad());
    clone->forward(torch::full({2, kChannels}, 4.0 * rank));
    RANK_REQUIRE(clone->running_mean.allclose(torch::full({kChannels}, 0.2)));
    RANK_REQUIRE(norm->running_mean.eq(0).all().item<bool>());
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("where all ranks together have one value per channel, all refuse alike and may go on",
          "[sync_batch_norm]") {
  const auto messages = failures(2, [](int rank, SyncBatchNorm& norm) {
    const std::string words = message_of<InvalidArgument>([&] {
      norm(torch::ones({rank == 0 ? 1 : 0, kChannels}));
    });
    RANK_REQUIRE(words.find("at least two values per channel over all ranks") != std::string::npos);
    RANK_REQUIRE(norm->num_batches_tracked.item<int64_t>() == 0);
    RANK_REQUIRE(norm(torch::ones({1, kChannels})).eq(0).all().item<bool>());  // one on each rank
  });
  CHECK(first_of(messages) == "");
}

TEST_CASE("an input that does not fit one rank is an error of all, which names that rank and the reason",
          "[sync_batch_norm]") {
  struct Mistake {
    Tensor x;
    const char* words;
  };
  const Mistake mistake = GENERATE(
      Mistake{torch::ones({2, 4}), "a SyncBatchNorm of 3 channels was given a tensor [2, 4] of 4 channels"},
      Mistake{torch::ones({3}), "takes tensors [N, C] or [N, C, ...], not one of 1 dimensions"},
      Mistake{Tensor(), "was given an undefined tensor"},
      Mistake{torch::ones({2, kChannels}, torch::kInt), "takes Float, BFloat16, Half or Double, not Int"},
      Mistake{torch::ones({2, kChannels}, torch::kDouble),
              "has parameters or statistics in Float, but over several "
              "ranks they must be Double for an input of Double"});
  const auto messages = failures(2, [&](int rank, SyncBatchNorm& norm) {
    norm(rank == 1 ? mistake.x : torch::ones({2, kChannels}));
  });
  CHECK_THAT(messages[1], ContainsSubstring(mistake.words));
  CHECK_THAT(messages[0],
             ContainsSubstring("rank 1 left: the forward pass of a SyncBatchNorm of 3 channels failed") &&
                 ContainsSubstring(mistake.words));
}

TEST_CASE("a second derivative over several ranks is refused, and a rank that asks for one alone is heard",
          "[sync_batch_norm]") {
  const auto messages = failures(2, [](int rank, SyncBatchNorm& norm) {
    const Tensor x = batch(3, {}, 12).to(torch::kFloat).requires_grad_();
    const Tensor y = norm(x).square().sum();
    torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/rank == 1, /*create_graph=*/rank == 1);
  });
  CHECK_THAT(messages[1], ContainsSubstring("has no second derivative (create_graph)"));
  CHECK_THAT(messages[0],
             ContainsSubstring("rank 1 left: the backward pass of a SyncBatchNorm of 3 channels failed"));
}

TEST_CASE("ranks that come to different layers are told so", "[sync_batch_norm]") {
  const auto worlds = Communicator::in_process(2);
  const auto messages = run_ranks(2, [&](int rank) {
    SyncBatchNorm first(3), second(5);
    const auto& world = worlds[static_cast<size_t>(rank)];
    convert_sync_batch_norm(*first, world);
    convert_sync_batch_norm(*second, world);
    if (rank == 0) first(torch::ones({2, 3}));
    second(torch::ones({2, 5}));
  });
  for (const std::string& message : messages) CHECK_THAT(message, ContainsSubstring("all_gather"));
}

TEST_CASE("a batch norm of no channels is refused", "[sync_batch_norm]") {
  CHECK_THAT(message_of<InvalidArgument>([] { SyncBatchNorm norm(0); }),
             ContainsSubstring("SyncBatchNorm needs a number of channels above 0, not 0"));
}

}  // namespace pacer::testing::sync_batch_norm
