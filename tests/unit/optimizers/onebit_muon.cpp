// OneBitMuon: one rank beside Muon, ranks as threads beside a restatement in fp64, and what they do with gradients
// that are missing or not finite. Edits, layouts, dtypes, memory and pairs of hooks are rows of the registry.
#include <cmath>

#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/onebit_muon.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/onebit_muon_ranks.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing::onebit_muon {
namespace {

// U V^T of the singular value decomposition, to which the iterations of options() come within 1e-6.
Tensor orthogonal(const Tensor& values) {
  const auto [u, s, v] = at::linalg_svd(values, /*full_matrices=*/false);
  return u.matmul(v);
}

// Element k of the buffer becomes the sign of values + errors, times the scale of its block in [begin, end), and
// the errors what that lost.
Tensor rounded(const Tensor& values, const Tensor& errors, bool by_blocks) {
  const Tensor carried = values + errors;
  Tensor result = torch::empty_like(carried);
  const int64_t block = by_blocks ? 2048 : carried.numel();
  for (int64_t first = 0; first < carried.numel(); first += block) {
    const Tensor part = carried.narrow(0, first, std::min(block, carried.numel() - first));
    const double scale = part.square().mean().sqrt().item<double>();
    result.narrow(0, first, part.numel()).copy_(torch::where(part < 0, -scale, scale));
  }
  errors.copy_(carried - result);
  return result;
}

// The rule, written from its description, for all ranks at once.
struct Restated {
  Restated(const Ranks& ranks, bool in_blocks, int64_t chunk_size)
      : by_blocks(in_blocks), chunk(chunk_size), values(ranks.values(0)) {
    values.pop_back();
    for (const Tensor& matrix : values) count += matrix.numel();
    for (size_t rank = 0; rank < ranks.world.size(); ++rank) {
      worker_errors.push_back(torch::zeros({count}, at::kDouble));
      momentum.emplace_back();
      for (const Tensor& matrix : values) momentum.back().push_back(torch::zeros_like(matrix));
    }
    server_errors = torch::zeros({count}, at::kDouble);
  }

  void step(const std::vector<std::vector<Tensor>>& gradients) {
    const size_t ranks = momentum.size();
    Tensor mean = torch::zeros({count}, at::kDouble);
    for (size_t rank = 0; rank < ranks; ++rank) {
      std::vector<Tensor> all;
      for (size_t i = 0; i < values.size(); ++i) {
        Tensor& m = momentum[rank][i];
        m = 0.95 * m + 0.05 * gradients[rank][i];
        const double side = static_cast<double>(std::max(m.size(0), m.size(1)));
        all.push_back((orthogonal(0.95 * m + 0.05 * gradients[rank][i]) * std::sqrt(side)).flatten());
      }
      mean += rounded(torch::cat(all), worker_errors[rank], by_blocks) / static_cast<double>(ranks);
    }
    for (int64_t first = 0; first < count; first += chunk) {
      const int64_t size = std::min(chunk, count - first);
      mean.narrow(0, first, size)
          .copy_(rounded(mean.narrow(0, first, size), server_errors.narrow(0, first, size), by_blocks));
    }
    int64_t first = 0;
    for (Tensor& p : values) {
      const Tensor o = orthogonal(mean.narrow(0, first, p.numel()).view_as(p));
      first += p.numel();
      p = p * (1 - 0.02 * 0.1) -
          0.02 * 0.2 * std::sqrt(static_cast<double>(std::max(p.size(0), p.size(1)))) * o;
    }
  }

  bool by_blocks;
  int64_t chunk, count = 0;
  std::vector<Tensor> values, worker_errors;
  std::vector<std::vector<Tensor>> momentum;  // [rank][matrix]
  Tensor server_errors;
};

}  // namespace

TEST_CASE("a single rank of OneBitMuon is Muon, to the bit", "[onebit_muon]") {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto chosen = OneBitMuonOptions(0.02).weight_decay(0.1).split(2);
    Ranks alone(1, chosen, dtype);
    std::vector<Tensor> twins = alone.values(0);
    for (Tensor& twin : twins) twin.requires_grad_();
    const auto of_muon = MuonOptions(0.02).weight_decay(0.1).split(2);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(twins.begin(), twins.end() - 1),
                        std::make_unique<MuonOptions>(of_muon));
    groups.emplace_back(std::vector<Tensor>{twins.back()},
                        std::make_unique<MuonOptions>(MuonOptions(of_muon).orthogonalize(false)));
    Muon muon(groups, of_muon);
    for (uint64_t t = 0; t < 4; ++t) {
      REQUIRE(alone.step(t) == "");
      for (size_t i = 0; i < twins.size(); ++i) twins[i].mutable_grad() = Ranks::gradient(twins[i], 0, t, i);
      muon.step();
      for (Tensor& twin : twins) CHECK(same_bits(twin.detach(), alone.values(0)[&twin - twins.data()]));
    }
    CHECK(alone.optimizers[0]->bytes_sent() == 0);
  }
}

TEST_CASE("ranks of OneBitMuon step as its description says, and AdamW gets mean gradients",
          "[onebit_muon][ranks]") {
  for (const int size : {1, 2, 3}) {
    for (const bool by_blocks : {true, false}) {
      CAPTURE(size, by_blocks);
      Ranks ranks(size, options().block_scales(by_blocks).compress_alone(true));
      // 4,936 elements in chunks of whole blocks, or of 128.
      const int64_t unit = by_blocks ? 2048 : 128, per_rank = (4936 + size - 1) / size;
      Restated restated(ranks, by_blocks, (per_rank + unit - 1) / unit * unit);
      Tensor vector = ranks.values(0).back().requires_grad_();
      FusedAdamW adamw({vector}, FusedAdamWOptions(0.02).weight_decay(0.1));
      for (uint64_t t = 0; t < 6; ++t) {
        REQUIRE(ranks.step(t) == "");
        ranks.require_equal_replicas();
        std::vector<std::vector<Tensor>> gradients;
        Tensor sum = torch::zeros_like(vector);
        for (size_t rank = 0; rank < ranks.world.size(); ++rank) {
          gradients.emplace_back();
          for (size_t i = 0; i < 3; ++i)
            gradients.back().push_back(Ranks::gradient(ranks.parameters[rank][i], rank, t, i));
          sum += Ranks::gradient(vector, rank, t, 3);
        }
        restated.step(gradients);
        vector.mutable_grad() = sum / size;
        adamw.step();
        std::vector<Tensor> found = ranks.values(0);
        CHECK(furthest({found.back()}, {vector.detach()}) < 1e-12);
        found.pop_back();
        // What travels is fp32, and the iterations end 1e-6 from the decomposition.
        CHECK(furthest(found, restated.values) < 2e-5);
      }
    }
  }
}

TEST_CASE("OneBitMuon sends a bit an element, and a scale a block", "[onebit_muon][ranks]") {
  Ranks ranks(2);
  REQUIRE(ranks.step(0) == "");
  const int64_t once = ranks.optimizers[0]->bytes_sent();
  REQUIRE(ranks.step(1) == "");
  CHECK(ranks.optimizers[0]->bytes_sent() == 2 * once);
  // A message there and one back, each a chunk of two blocks: header, scales, bits.
  CHECK(once == 2 * (16 + 16 + 4096 / 8));
}

TEST_CASE("a gradient that OneBitMuon finds not finite on one rank changes nothing on any",
          "[onebit_muon][ranks]") {
  for (const size_t which : {0, 3}) {
    Ranks ranks(2), untouched(2);
    for (Ranks* both : {&ranks, &untouched}) REQUIRE(both->step(0) == "");
    const auto spoil = [&](size_t rank) {
      if (rank == 1) ranks.parameters[1][which].mutable_grad().flatten()[0] = NAN;
    };
    REQUIRE(ranks.step(1, spoil) == "");
    for (size_t rank : {0, 1}) CHECK(same_bits(ranks.values(rank), untouched.values(rank)));
    CHECK(ranks.optimizers[0]->skipped_steps() == 1);
    for (Ranks* both : {&ranks, &untouched}) REQUIRE(both->step(2) == "");
    for (size_t rank : {0, 1}) CHECK(same_bits(ranks.values(rank), untouched.values(rank)));
  }
}

TEST_CASE("a matrix without a gradient counts as one of zeros, a frozen one stays", "[onebit_muon][ranks]") {
  Ranks missing(2), zero(2);
  REQUIRE(missing.step(0, [&](size_t rank) {
    if (rank == 1) missing.parameters[1][0].mutable_grad() = Tensor();
  }) == "");
  REQUIRE(zero.step(0, [&](size_t rank) {
    if (rank == 1) zero.parameters[1][0].mutable_grad().zero_();
  }) == "");
  CHECK(same_bits(missing.values(0), zero.values(0)));
  for (auto& own : missing.parameters) own[1].requires_grad_(false);
  const std::vector<Tensor> before = missing.values(0);
  REQUIRE(missing.step(1) == "");
  missing.require_equal_replicas();
  CHECK(same_bits(missing.values(0)[1], before[1]));
  CHECK(furthest({missing.values(0)[0]}, {before[0]}) > 1e-4);
}

TEST_CASE("nodes of OneBitMuon are workers: a node's mean gradient counts", "[onebit_muon][ranks][nodes]") {
  Ranks nodes(4, options().hierarchical(true), at::kDouble, 2), workers(2);
  const auto means = [&](size_t worker, uint64_t t) {
    for (size_t i = 0; i < 4; ++i) {
      const Tensor& p = workers.parameters[worker][i];
      p.mutable_grad() =
          (Ranks::gradient(p, 2 * worker, t, i) + Ranks::gradient(p, 2 * worker + 1, t, i)) / 2;
    }
  };
  for (uint64_t t = 0; t < 4; ++t) {
    REQUIRE(nodes.step(t) == "");
    REQUIRE(workers.step(t, [&](size_t worker) { means(worker, t); }) == "");
    nodes.require_equal_replicas();
    CHECK(furthest(nodes.values(0), workers.values(0)) < 1e-5);
  }
}

}  // namespace pacer::testing::onebit_muon
