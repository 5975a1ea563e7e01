// 1-bit optimizers in Sessions of threads as ranks, whose momentum travels in buckets: while backward runs,
// or behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/collectives/momentum_lane.h"
#include "support/heard_warnings.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/optimizers/onebit_sessions.h"

namespace pacer::testing::onebit_overlap {

constexpr int kRanks = 3;
constexpr size_t kBuckets = 5;

template <class O>
OptionsOf<O> options_of(bool overlap) {
  return OptionsOf<O>(0.01).freeze_step(2).weight_decay(0.1).bucket_bytes(1).overlap_backward(overlap);
}
template <class O>
GroupsOf<O> groups_of(bool overlap) {
  const auto options = options_of<O>(overlap);
  return {{{{300}, {7}, {40, 50}, {3000}, {64}}, options}, {{{5}}, OptionsOf<O>(options).compress(false)}};
}

// Ranks in Sessions, whose loss leaves parameters out that are not trained or are `unused` on a rank.
template <class O>
struct Run {
  explicit Run(bool overlap, const std::function<void(Session&)>& use = nullptr)
      : ranks(kRanks, groups_of<O>(overlap)), sessions(ranks, [&](Session& session) {
          if (use) use(session);
        }) {
    ahead.resize(kRanks);
  }
  Tensor loss(size_t rank, const std::vector<Tensor>& gradients) const {
    Tensor sum;
    for (size_t i = 0; i < gradients.size(); ++i) {
      const Tensor& p = ranks.parameters[rank][i];
      if (!p.requires_grad() || (rank == 1 && unused.count(i) != 0)) continue;
      const Tensor part = (p * gradients[i]).sum();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  // Each rank's message, "" where the step came to its end.
  std::vector<std::string> step(const std::vector<std::vector<std::vector<Tensor>>>& micro_steps) {
    return run_ranks(kRanks, [&](int number) {
      const auto rank = static_cast<size_t>(number);
      std::string said;
      HeardWarnings ear(said);
      const c10::WarningUtils::WarningHandlerGuard guard(&ear);
      Session& session = *sessions.of_rank[rank];
      for (const auto& gradients : micro_steps) {
        const int64_t before = sent_there(*ranks.world[rank]);
        static_cast<void>(session.begin(at::zeros({1})));
        if (tokens > 0) session.count_tokens(tokens);
        session.backward(loss(rank, gradients[rank]));
        ahead[rank] = sent_there(*ranks.world[rank]) - before;
        if (between) between(rank);
        session.step();
      }
    });
  }

  OneBitRanks<O> ranks;
  Sessions sessions;
  std::set<size_t> unused;
  int64_t tokens = 0;                        // of each micro-batch, where this is not 0
  std::vector<int64_t> ahead;                // [rank]: buckets that left during the last backward
  std::function<void(size_t rank)> between;  // backward and step
};

}  // namespace pacer::testing::onebit_overlap
