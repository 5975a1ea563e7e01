// Ranks that train matrices with OneBitMuon, each with gradients of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/optimizers/onebit_muon.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::onebit_muon {

using torch::Tensor;

// Two and a half blocks of 2,048 elements in the matrices, and a vector for AdamW.
inline const std::vector<std::vector<int64_t>> kShapes = {{48, 32}, {24, 100}, {20, 50}, {9}};

inline OneBitMuonOptions options() {
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

inline double furthest(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

}  // namespace pacer::testing::onebit_muon
