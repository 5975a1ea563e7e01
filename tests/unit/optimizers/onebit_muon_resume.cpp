// OneBitMuon: resumes with as many and with other ranks, and what is refused.
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/onebit_muon.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/message_of.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_muon_ranks.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing::onebit_muon {
namespace {

NamedTensors copied(const NamedTensors& state) { return copies_of(state); }

// New ranks that go on from what others have left: each from its own, or from what is joined.
void go_on(Ranks& ranks, const Ranks& from) {
  const NamedTensors state = copied(from.optimizers[0]->export_state());
  std::vector<NamedTensors> rank_states;
  for (const auto& optimizer : from.optimizers) rank_states.push_back(copied(optimizer->export_rank_state()));
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (size_t i = 0; i < kShapes.size(); ++i)
      ranks.parameters[r][i].detach().copy_(from.parameters[0][i].detach());
    SessionOptimizer& optimizer = *ranks.optimizers[r];
    const bool fits = r < rank_states.size() && optimizer.fits_rank_state(state, rank_states[r]) &&
                      ranks.size() == from.size();
    optimizer.import_states(state, fits ? rank_states[r] : optimizer.join_rank_states(state, rank_states));
  }
}

}  // namespace

TEST_CASE("OneBitMuon goes on to the bit with as many ranks", "[onebit_muon][ranks][resume]") {
  for (const int size : {1, 2, 3}) {
    CAPTURE(size);
    const auto chosen = options().compress_alone(true).normalize_rows(true);
    Ranks unbroken(size, chosen);
    for (uint64_t t = 0; t < 3; ++t) REQUIRE(unbroken.step(t) == "");
    Ranks resumed(size, chosen);
    go_on(resumed, unbroken);
    for (uint64_t t = 3; t < 6; ++t) {
      REQUIRE(unbroken.step(t) == "");
      REQUIRE(resumed.step(t) == "");
      for (size_t rank = 0; rank < unbroken.world.size(); ++rank)
        CHECK(same_bits(resumed.values(rank), unbroken.values(rank)));
    }
  }
}

TEST_CASE("with other ranks OneBitMuon begins with the mean of all momentum",
          "[onebit_muon][ranks][resume]") {
  for (const auto& [before, now] : std::vector<std::pair<int, int>>{{2, 1}, {2, 4}, {4, 2}, {1, 2}}) {
    CAPTURE(before, now);
    Ranks from(before), to(now);
    for (uint64_t t = 0; t < 3; ++t) REQUIRE(from.step(t) == "");
    go_on(to, from);
    for (size_t i = 0; i < 3; ++i) {
      const auto momentum = [&](const Ranks& ranks, size_t rank) {
        const Tensor& p = ranks.parameters[rank][i];
        return static_cast<const OneBitMuonParamState&>(
                   *ranks.optimizers[rank]->state().at(p.unsafeGetTensorImpl()))
            .exp_avg();
      };
      Tensor mean = torch::zeros_like(momentum(from, 0));
      for (size_t rank = 0; rank < from.world.size(); ++rank) mean += momentum(from, rank) / before;
      for (size_t rank = 0; rank < to.world.size(); ++rank)
        CHECK(furthest({momentum(to, rank)}, {mean}) < 1e-15);
    }
    if (before > 1 && now > 1) {
      // The mean of worker errors and all server errors are still to be sent.
      const auto sum = [](const Ranks& ranks, const char* field, bool is_mean) {
        double total = 0;
        for (const auto& optimizer : ranks.optimizers) {
          for (const auto& [name, tensor] : optimizer->export_rank_state()) {
            if (contains(name, field)) total += tensor.sum().item<double>();
          }
        }
        return is_mean ? total / ranks.size() : total;
      };
      CHECK(std::abs(sum(to, "/worker_error", true) - sum(from, "/worker_error", true)) < 1e-2);
      CHECK(std::abs(sum(to, "/server_error", false) - sum(from, "/server_error", false)) < 1e-2);
    }
    REQUIRE(to.step(3) == "");
    to.require_equal_replicas();
  }
}

TEST_CASE("OneBitMuon refuses in a sentence what it cannot do", "[onebit_muon][ranks]") {
  Ranks ranks(2);
  REQUIRE(ranks.step(0) == "");
  OneBitMuon& one = *ranks.optimizers[0];
  torch::serialize::OutputArchive archive;
  CHECK(contains(message_of([&] { one.save(archive); }), "cannot be saved to one archive"));
  CHECK(contains(static_cast<SessionOptimizer&>(one).unshared_reason(GradientScope::world),
                 "use DataParallel"));
  const Tensor p = torch::ones({3, 3}).requires_grad_();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<Tensor>{p}, std::make_unique<OneBitMuonOptions>(options()));
  groups.emplace_back(std::vector<Tensor>{torch::ones({3, 3}).requires_grad_()},
                      std::make_unique<OneBitMuonOptions>(options().block_scales(false)));
  CHECK(contains(message_of([&] { OneBitMuon(groups, options(), Communicator::alone(at::kCPU)); }),
                 "group 1 has scale rms, block_scales 0"));
  const auto before = ranks.values(0);
  for (auto& optimizer : ranks.optimizers) {
    static_cast<OneBitMuonOptions&>(optimizer->param_groups()[0].options()).scale(ScaleNorm::l1);
    static_cast<OneBitMuonOptions&>(optimizer->param_groups()[1].options()).scale(ScaleNorm::l1);
  }
  CHECK(contains(ranks.step(1), "was changed after the first step"));
  CHECK(same_bits(ranks.values(0), before));
}

TEST_CASE("a matrix that is added after the first step of OneBitMuon is refused", "[onebit_muon][ranks]") {
  Ranks ranks(2);
  REQUIRE(ranks.step(0) == "");
  std::vector<Tensor> added;
  for (auto& optimizer : ranks.optimizers) {
    added.push_back(torch::ones({3, 3}, at::kDouble).requires_grad_());
    torch::optim::OptimizerParamGroup group({added.back()}, std::make_unique<OneBitMuonOptions>(options()));
    optimizer->add_param_group(group);
    added.back().mutable_grad() = torch::ones({3, 3}, at::kDouble);
  }
  const auto before = ranks.values(0);
  CHECK(contains(ranks.step(1), "was added after the first step"));
  CHECK(same_bits(ranks.values(0), before));
}

}  // namespace pacer::testing::onebit_muon
