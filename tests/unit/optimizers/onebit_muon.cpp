// OneBitMuon: one rank beside Muon, ranks as threads beside a restatement in fp64, what they do with gradients that
// are missing or not finite, resumes with as many and with other ranks, and what is refused. Edits, layouts,
// dtypes, memory and pairs of hooks are rows of the registry.
#include <cmath>
#include <functional>

#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/onebit_muon.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing::onebit_muon {
namespace {

using torch::Tensor;

// Two and a half blocks of 2,048 elements in the matrices, and a vector for AdamW.
const std::vector<std::vector<int64_t>> kShapes = {{48, 32}, {24, 100}, {20, 50}, {9}};

OneBitMuonOptions options() {
  return OneBitMuonOptions(0.02)
      .weight_decay(0.1)
      .ns_coefficients(MuonCoefficients::polar_express)
      .ns_steps(8);
}

// Ranks that train the same parameters, each with gradients of its own.
struct Ranks {
  explicit Ranks(int world_size, const OneBitMuonOptions& of_matrices = options(),
                 at::ScalarType dtype = at::kDouble, int ranks_per_node = 0)
      : world(Communicator::in_process(world_size, by_nodes_of(ranks_per_node))) {
    for (int rank = 0; rank < world_size; ++rank) {
      torch::manual_seed(3);
      std::vector<Tensor> own;
      for (const auto& shape : kShapes)
        own.push_back(torch::randn(shape, at::kDouble).to(dtype).requires_grad_());
      parameters.push_back(own);
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(std::vector<Tensor>(own.begin(), own.end() - 1),
                          std::make_unique<OneBitMuonOptions>(of_matrices));
      groups.emplace_back(
          std::vector<Tensor>{own.back()},
          std::make_unique<OneBitMuonOptions>(OneBitMuonOptions(of_matrices).orthogonalize(false)));
      optimizers.push_back(
          std::make_unique<OneBitMuon>(groups, of_matrices, world[static_cast<size_t>(rank)]));
    }
  }

  int size() const { return static_cast<int>(world.size()); }
  static Tensor gradient(const Tensor& parameter, size_t rank, uint64_t step, size_t i) {
    torch::manual_seed(1000 * step + 10 * rank + i);
    return torch::randn(parameter.sizes(), at::kDouble).to(parameter.scalar_type());
  }
  // Returns the message of the first rank that threw.
  std::string step(uint64_t step, const std::function<void(size_t rank)>& edit = nullptr) {
    for (size_t rank = 0; rank < world.size(); ++rank) {
      for (size_t i = 0; i < parameters[rank].size(); ++i) {
        parameters[rank][i].mutable_grad() = gradient(parameters[rank][i], rank, step, i);
      }
      if (edit) edit(rank);
    }
    return first_of(run_ranks(size(), [&](int rank) { optimizers[static_cast<size_t>(rank)]->step(); }));
  }
  std::vector<Tensor> values(size_t rank) const {
    std::vector<Tensor> copies;
    for (const Tensor& parameter : parameters[rank]) copies.push_back(parameter.detach().clone());
    return copies;
  }
  void require_equal_replicas() const {
    for (size_t rank = 1; rank < world.size(); ++rank) REQUIRE(same_bits(values(rank), values(0)));
  }

  std::vector<std::shared_ptr<Communicator>> world;
  std::vector<std::vector<Tensor>> parameters;  // by rank
  std::vector<std::unique_ptr<OneBitMuon>> optimizers;
};

double furthest(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

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
