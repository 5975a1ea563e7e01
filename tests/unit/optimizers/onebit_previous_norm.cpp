// 1-bit optimizers whose gradients are clipped by the norm of the step before: each bucket against a textbook
// of its own, and how long a step can become.
#include <algorithm>
#include <cmath>

#include "support/catch.h"

#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_sessions.h"

#include <pacer/hooks/gradient_clipping.h>

namespace pacer::testing::onebit_previous_norm {
namespace {

using Gradients = std::vector<std::vector<Tensor>>;  // [rank][parameter]

// Each parameter is a bucket of its own, and so has a textbook of its own.
template <class O>
std::vector<TextbookOf<O>> textbooks_of(const OneBitRanks<O>& ranks, const GroupsOf<O>& groups) {
  typename TextbookOf<O>::Rules rules;
  set_rules(ranks, groups.front().options, rules);
  Family<O>::set_rules(groups.front().options, rules);
  std::vector<TextbookOf<O>> all;
  for (const auto& p : textbook_of(ranks, groups).parameters) {
    all.emplace_back(rules, std::vector<typename TextbookOf<O>::Parameter>{p});
  }
  return all;
}

// The rule of buckets, restated: what multiplies gradients, and which norm a step leaves behind.
struct Clipping {
  double max_norm = 0, previous = 0;
  int64_t by_previous = 0, by_own = 0;  // how often which of them was the stricter one
  double longest = 0;                   // of the clipped norms of compressed steps

  double of(double own, double largest) {
    const double by_last = std::min(1.0, max_norm / previous), by_itself = std::min(1.0, largest / own);
    by_previous += by_last < by_itself;
    by_own += by_itself < by_last;
    return std::min(by_last, by_itself);
  }
};

// A step of all textbooks. Returns the norm of all.
template <class Textbook>
double step(std::vector<Textbook>& textbooks, const Gradients& gradients, Clipping& clipping) {
  const auto ranks = static_cast<double>(gradients.size());
  const TextbookGradients all = textbook_gradients(gradients);
  std::vector<TextbookGradients> of_each(textbooks.size());
  double squares = 0;
  for (size_t i = 0; i < textbooks.size(); ++i) {
    for (const auto& of_rank : all) of_each[i].push_back({of_rank[i]});
    squares += std::pow(clipping_norm(textbooks[i], of_each[i]), 2);
  }
  const double norm = std::sqrt(squares), clip = std::min(1.0, clipping.max_norm / norm);
  double clipped_squares = 0;
  for (size_t i = 0; i < textbooks.size(); ++i) {
    Textbook& textbook = textbooks[i];
    if (!all_finite(all)) (*of_each[i][0][0])[0] = std::nanf("");  // no bucket takes the step
    const bool travels = textbook.parameters[0].compress && textbook.exchanges_next();
    textbook.clips_of_ranks.clear();
    for (size_t rank = 0; travels && rank < gradients.size(); ++rank) {
      const double own = std::sqrt(square_of(*all[rank][i]));
      textbook.clips_of_ranks.push_back(clipping.of(own, clipping.max_norm * std::sqrt(ranks)));
      clipped_squares += std::pow(textbook.clips_of_ranks.back() * own / ranks, 2);
    }
    if (!travels) clipped_squares += std::pow(clip * clipping_norm(textbook, of_each[i]), 2);
    textbook.step(of_each[i], clip);
  }
  if (std::isfinite(norm)) {
    clipping.previous = norm;
    clipping.longest = std::max(clipping.longest, std::sqrt(clipped_squares));
  }
  return norm;
}

template <class O>
std::string difference_from(const std::vector<TextbookOf<O>>& textbooks, const OneBitRanks<O>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const NamedTensors state = ranks.optimizers[rank]->export_state();
    const NamedTensors errors = ranks.optimizers[rank]->export_rank_state();
    for (size_t i = 0; i < textbooks.size(); ++i) {
      const auto& p = textbooks[i].parameters[0];
      const std::string name = ranks.optimizers[rank]->parameter_name(ranks.parameters[rank][i]);
      if (!equals_bits(ranks.value(rank, i), p.value)) return "value of " + name;
      if (!equals_bits(state.at(name + "/exp_avg"), p.momentum)) return "exp_avg of " + name;
      const auto error = errors.find(name + "/worker_error");
      if (error != errors.end() &&
          !equals_bits(error->second, textbooks[i].exchange.worker_errors[rank], p.offset)) {
        return "worker_error of " + name;
      }
    }
  }
  return "";
}

}  // namespace

TEMPLATE_TEST_CASE("by the norm before, each bucket is clipped as a textbook of its own is",
                   "[onebit_adam][onebit_lamb][clipping]", OneBitAdam, OneBitLamb) {
  using O = OptionsOf<TestType>;
  for (const int world_size : {1, 2, 4}) {
    for (const double max_norm : {0.5, 3.0, 1e6}) {
      CAPTURE(world_size, max_norm);
      const O options = Family<TestType>::refreshed(
          O(0.01).freeze_step(3).compress_alone(true).bucket_bytes(1).variance_floor(0), 4);
      const GroupsOf<TestType> groups = {{{{40, 5}, {7}, {300}}, options},
                                         {{{64}}, O(options).compress(false)}};
      OneBitRanks<TestType> ranks(world_size, groups);
      auto textbooks = textbooks_of(ranks, groups);
      Sessions sessions(ranks, [=](Session& session) {
        session.use(GradientClipping(GradientClippingOptions(max_norm).by_previous_norm(true)));
      });
      Clipping clipping{max_norm};
      for (int64_t t = 0; t < 14; ++t) {
        CAPTURE(t);
        Gradients gradients = ranks.gradients(t);
        const auto odd = static_cast<size_t>(t % world_size);
        if (t == 5 || t == 8) gradients[odd][0].mul_(30);  // a spike of one rank in one bucket
        if (t == 9) gradients[odd][2][17] = std::nan("");  // a step that is skipped
        if (t == 12) gradients[odd][3].mul_(200);          // a spike in what is not compressed
        const double norm = step(textbooks, gradients, clipping);
        REQUIRE(sessions.step(ranks, {gradients}) == "");
        if (t != 9) {
          REQUIRE(sessions.of_rank[0]->gradient_norm() == Catch::Approx(norm).epsilon(1e-12));
        }
        REQUIRE(difference_from(textbooks, ranks) == "");
      }
      CHECK(sessions.finish(ranks) == "");
      // The bound: three buckets, and the rest. A spike would have been far beyond it.
      CHECK(clipping.longest <= max_norm * 2 * (1 + 1e-12));
      CHECK((clipping.by_previous > 0) == (max_norm < 1e6));
      CHECK((clipping.by_own > 0) == (max_norm < 1e6));
    }
  }
}

TEMPLATE_TEST_CASE("a norm that reaches nothing leaves the bits of no clipping",
                   "[onebit_adam][onebit_lamb][clipping]", OneBitAdam, OneBitLamb) {
  const GroupsOf<TestType> groups = {
      {{{40, 5}, {300}}, OptionsOf<TestType>(0.01).freeze_step(2).bucket_bytes(1)}};
  OneBitRanks<TestType> clipped(3, groups), plain(3, groups);
  Sessions with(clipped, [](Session& session) {
    session.use(GradientClipping(GradientClippingOptions(1e6).by_previous_norm(true)));
  });
  Sessions without(plain, [](Session&) {});
  for (int64_t t = 0; t < 8; ++t) {
    REQUIRE(with.step(clipped, {clipped.gradients(t)}) == "");
    REQUIRE(without.step(plain, {plain.gradients(t)}) == "");
    for (size_t rank = 0; rank < 3; ++rank) {
      REQUIRE(differing_name(clipped.optimizers[rank]->export_state(),
                             plain.optimizers[rank]->export_state()) == "");
      REQUIRE(differing_name(clipped.optimizers[rank]->export_rank_state(),
                             plain.optimizers[rank]->export_rank_state()) == "");
    }
  }
  CHECK(with.finish(clipped) == "");
  CHECK(without.finish(plain) == "");
}

}  // namespace pacer::testing::onebit_previous_norm
