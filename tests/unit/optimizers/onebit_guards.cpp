// What keeps signs from ruining a parameter: vectors stay in full precision, no element moves further than
// Adam could move it, one that never had a gradient stays. And what ranks are held to without a Session.
#include "support/catch.h"

#include <cstdlib>

#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_muon_ranks.h"
#include "support/optimizers/onebit_refusals.h"

namespace pacer::testing::onebit_guards {
namespace {

template <class O>
OptionsOf<O> frozen_at(int64_t step) {
  return OptionsOf<O>(1e-3).freeze_step(step).weight_decay(0);
}

// A variable of the environment, for as long as this lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, /*overwrite=*/1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

}  // namespace

TEMPLATE_TEST_CASE("vectors of compressed groups take the steps of full precision",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const auto options = frozen_at<TestType>(3).weight_decay(0.1);
  const GroupsOf<TestType> groups = {{{{16, 9}, {40}, {}, {3, 1}}, options}};
  OneBitRanks<TestType> ranks(2, groups, at::kFloat, 0, /*compress_vectors=*/false);
  OneBitRanks<TestType> in_full(
      2, {{{{16, 9}, {40}, {}, {3, 1}}, OptionsOf<TestType>(options).compress(false)}});
  for (int64_t t = 0; t < 8; ++t) {
    const auto gradients = ranks.gradients(t);
    REQUIRE(ranks.step(gradients) == "");
    REQUIRE(in_full.step(gradients) == "");
    if (t == 5) ranks.resume();
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    CAPTURE(rank);
    for (const size_t i : {1u, 2u}) {
      CHECK(same_bits(ranks.parameters[rank][i], in_full.parameters[rank][i]));
    }
    for (const size_t i : {0u, 3u}) {
      CHECK(!same_bits(ranks.parameters[rank][i], in_full.parameters[rank][i]));
      CHECK(same_bits(ranks.parameters[rank][i], ranks.parameters[0][i]));
    }
  }
}

TEMPLATE_TEST_CASE("a frozen state of before version 3 goes on with its vectors compressed",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const GroupsOf<TestType> groups = {{{{16, 9}, {40}}, frozen_at<TestType>(3)}};
  OneBitRanks<TestType> before(2, groups);
  for (int64_t t = 0; t < 6; ++t) REQUIRE(before.step(before.gradients(t)) == "");
  OneBitRanks<TestType> after(2, groups, at::kFloat, 0, /*compress_vectors=*/false);
  for (size_t rank = 0; rank < 2; ++rank) {
    NamedTensors state = cloned_state(before.optimizers[rank]->export_state());
    REQUIRE(state.erase("group/0/compress_vectors") == 1);
    state["state_version"] = number_tensor(int64_t{2});
    for (size_t i = 0; i < 2; ++i)
      after.parameters[rank][i].detach().copy_(before.parameters[rank][i].detach());
    CHECK(contract(*after.optimizers[rank])
              .fits_rank_state(state, before.optimizers[rank]->export_rank_state()));
    after.optimizers[rank]->import_states(state, cloned_state(before.optimizers[rank]->export_rank_state()));
  }
  for (int64_t t = 6; t < 10; ++t) {
    REQUIRE(before.step(before.gradients(t)) == "");
    REQUIRE(after.step(after.gradients(t)) == "");
  }
  CHECK(same_bits(after.parameters[0], before.parameters[0]));

  // One that has not frozen yet takes the options as they are now.
  OneBitRanks<TestType> young(1, groups), next(1, groups, at::kFloat, 0, /*compress_vectors=*/false);
  REQUIRE(young.step(young.gradients(0)) == "");
  NamedTensors state = cloned_state(young.optimizers[0]->export_state());
  state.erase("group/0/compress_vectors");
  state["state_version"] = number_tensor(int64_t{2});
  next.optimizers[0]->import_state(state);
  CHECK(contract(*next.optimizers[0]).local_parameters().empty());  // a single rank exchanges nothing
  const auto& options =
      static_cast<const OptionsOf<TestType>&>(next.optimizers[0]->param_groups()[0].options());
  CHECK(!options.compress_vectors());
}

TEMPLATE_TEST_CASE("rows that never had a gradient stay where they are", "[onebit_adam][onebit_lamb]",
                   OneBitAdam, OneBitLamb) {
  const double floor = GENERATE(0.01, 0.0);
  const int64_t every = GENERATE(0, 8, 16);  // 8: one more before they have a gradient
  OptionsOf<TestType> options =
      Family<TestType>::refreshed(frozen_at<TestType>(4).variance_floor(floor), every);
  OneBitRanks<TestType> ranks(2, {{{{64, 33}, {20, 5}}, options}});
  const auto start = clones(ranks.parameters[0]);
  const auto rows = [](const Tensor& of) { return of.detach().narrow(0, 10, 30).clone(); };
  const auto without_rows = [&](int64_t t) {
    auto gradients = ranks.gradients(t);
    for (auto& of_rank : gradients) of_rank[0].narrow(0, 10, 30).zero_();
    return gradients;
  };
  for (int64_t t = 0; t < 19; ++t) REQUIRE(ranks.step(without_rows(t)) == "");
  CAPTURE(floor, every);
  for (size_t rank = 0; rank < 2; ++rank) {
    CHECK(same_bits(rows(ranks.parameters[rank][0]), rows(start[0])));
    CHECK(!same_bits(ranks.parameters[rank][0], start[0]));
    CHECK(!same_bits(ranks.parameters[rank][1], start[1]));
  }
  REQUIRE(ranks.step(ranks.gradients(19)) == "");  // all rows; with `every` a refresh
  const Tensor then = rows(ranks.parameters[0][0]);
  REQUIRE(ranks.step(ranks.gradients(20)) == "");
  const bool refreshed = every > 0 && std::is_same_v<TestType, OneBitAdam>;
  CHECK(same_bits(rows(ranks.parameters[0][0]), then) == !refreshed);
}

TEMPLATE_TEST_CASE("a tensor of noise beside large ones moves no further than Adam could move it",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const bool blocks = GENERATE(true, false);
  const double floor = GENERATE(0.01, 0.0);
  OptionsOf<TestType> options = frozen_at<TestType>(40).variance_floor(floor).block_scales(blocks).eps(1e-30);
  OneBitRanks<TestType> ranks(2, {{{{32, 32}, {2, 16}, {48}}, options}});
  const auto gradients = [&](int64_t t) {
    auto all = ranks.gradients(t);
    for (auto& of_rank : all) of_rank[1].mul_(1e-9), of_rank[2].mul_(1e-9);
    return all;
  };
  for (int64_t t = 0; t < 40; ++t) REQUIRE(ranks.step(gradients(t)) == "");
  const double most = 0.1 / std::sqrt(0.001) / std::sqrt(1 - 0.81 / 0.999);
  double largest = 0;
  for (int64_t t = 40; t < 80; ++t) {
    const auto before = clones(ranks.parameters[0]);
    REQUIRE(ranks.step(gradients(t)) == "");
    for (const size_t i : {1u, 2u}) {
      double rate = 1e-3;
      if constexpr (std::is_same_v<TestType, OneBitLamb>) {
        rate *= ranks.optimizers[0]->coefficient(ranks.parameters[0][i]) *
                ranks.optimizers[0]->factor(ranks.parameters[0][i]);
      }
      largest = std::max(largest, distance(before[i], ranks.parameters[0][i]) / rate);
    }
  }
  CAPTURE(blocks, floor, largest);
  CHECK(largest <= 1.02 * most);  // c1 is not 1 yet
}

TEMPLATE_TEST_CASE("ranks that begin with other values are told so before the first step",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  OneBitRanks<TestType> ranks(2, {{{{4, 3}, {5}}, frozen_at<TestType>(2)}});
  ranks.parameters[1][1].detach()[3] += 1e-6;
  const auto start = clones(ranks.parameters[0]);
  const auto gradients = ranks.gradients(0);
  for (const int64_t attempt : {0, 1}) {
    CAPTURE(attempt);
    const std::string message = ranks.step(gradients);
    CHECK(contains(message, "values of parameter 0.1"));
    CHECK(contains(message, "a Session broadcasts those of rank 0"));
    CHECK(same_bits(ranks.parameters[0], start));
  }
  ranks.parameters[1][1].detach().copy_(start[1].detach());
  CHECK(ranks.step(gradients) == "");
  CHECK(same_bits(ranks.parameters[0], ranks.parameters[1]));
}

TEMPLATE_TEST_CASE("a parameter that one rank alone moves to another group is noticed",
                   "[onebit_adam][onebit_lamb]", OneBitAdam, OneBitLamb) {
  const auto options = frozen_at<TestType>(9);
  OneBitRanks<TestType> ranks(2, {{{{4, 3}, {5, 2}}, options}, {{{6, 2}}, options}});
  REQUIRE(ranks.step(ranks.gradients(0)) == "");
  auto& groups = ranks.optimizers[1]->param_groups();  // the order of all parameters stays as it was
  groups[1].params().insert(groups[1].params().begin(), groups[0].params().back());
  groups[0].params().pop_back();
  CHECK(contains(ranks.step(ranks.gradients(1)), "group 1"));
}

TEST_CASE("ranks of OneBitMuon are held to the same values and groups", "[onebit_muon]") {
  for (const size_t i : {1u, 3u}) {  // a matrix, and the vector of the second group
    CAPTURE(i);
    onebit_muon::Ranks ranks(2);
    const auto start = ranks.values(0);
    ranks.parameters[1][i].detach().view(-1)[3] += 1e-6;
    const auto other = ranks.values(1);
    for (const uint64_t attempt : {0u, 1u}) {
      CAPTURE(attempt);
      const std::string message = ranks.step(0);
      CHECK(contains(message, i == 1 ? "values of parameter 0.1" : "values of parameter 1.0"));
      CHECK(contains(message, "a Session broadcasts those of rank 0"));
      CHECK(same_bits(ranks.values(0), start));
      CHECK(same_bits(ranks.values(1), other));
    }
    ranks.parameters[1][i].detach().copy_(start[i]);
    REQUIRE(ranks.step(0) == "");
    ranks.require_equal_replicas();
  }
  onebit_muon::Ranks ranks(2);
  REQUIRE(ranks.step(0) == "");
  auto& groups = ranks.optimizers[1]->param_groups();  // the order of all parameters stays as it was
  groups[1].params().insert(groups[1].params().begin(), groups[0].params().back());
  groups[0].params().pop_back();
  CHECK(contains(ranks.step(1), "group 1"));
}

TEST_CASE("a vector's coefficient is the mean of its trust ratios, before the freeze and after it",
          "[onebit_lamb]") {
  const auto options = frozen_at<OneBitLamb>(4).coeff_beta(0.9).bias_correction(true).compress_alone(true);
  const Tensor matrix = at::ones({8, 4}).requires_grad_(), vector = at::full({6}, 2.0).requires_grad_();
  const Tensor twin = at::full({6}, 2.0).requires_grad_();
  OneBitLamb optimizer(std::vector<Tensor>{matrix, vector}, options, Communicator::alone(at::kCPU));
  FusedLamb reference(std::vector<Tensor>{twin}, FusedLambOptions(1e-3).weight_decay(0));
  double mean = 0, weight = 0;
  for (int64_t t = 1; t <= 9; ++t) {
    const Tensor gradient = at::linspace(-1, 2, 6) * static_cast<double>(t % 3 + 1);
    matrix.mutable_grad() = at::ones({8, 4});
    vector.mutable_grad() = gradient.clone();
    twin.mutable_grad() = gradient.clone();
    optimizer.step();
    reference.step();
    REQUIRE(same_bits(vector, twin));
    mean = 0.9 * mean + 0.1 * reference.trust_ratio(twin);
    weight = 0.9 * weight + 0.1;
    CAPTURE(t);
    CHECK(optimizer.coefficient(vector) == Catch::Approx(mean / weight).epsilon(1e-6));
  }
}

TEMPLATE_TEST_CASE("one of several processes needs a Communicator",
                   "[onebit_adam][onebit_lamb][onebit_muon][refusals]", OneBitAdam, OneBitLamb, OneBitMuon) {
  const auto options = [] {
    if constexpr (std::is_same_v<TestType, OneBitMuon>) {
      return OneBitMuonOptions(1e-3);
    } else {
      return frozen_at<TestType>(2);
    }
  }();
  const std::vector<Tensor> parameters = {at::zeros({4, 3}).requires_grad_()};
  const Variable rank("RANK", "0"), size("WORLD_SIZE", "2"), address("MASTER_ADDR", "127.0.0.1"),
      port("MASTER_PORT", "1");
  const std::string message = refusal([&] { TestType(parameters, options); });
  CHECK(contains(message, "2 ranks"));
  CHECK(contains(message, "Communicator::from_environment()"));
  CHECK(contains(message, "Communicator::alone(device)"));
  TestType(parameters, options, Communicator::alone(at::kCPU));
}

}  // namespace pacer::testing::onebit_guards
