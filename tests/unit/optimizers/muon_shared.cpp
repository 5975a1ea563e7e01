// Muon whose ranks share the products of a step: beside one that makes all of them itself, the bytes that travel,
// ranks that differ, and steps that fail.
#include <functional>
#include <numeric>

#include <pacer/optimizers/muon.h>
#include <torch/types.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/message_of.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/optimizers.h"
#include "support/session/small_run.h"

namespace pacer::testing::muon_shared {
namespace {

// Three of one shape, two of another, so that ranks have parts of different sizes, some that come once, and a vector.
const std::vector<std::vector<int64_t>> kShapes = {{6, 4}, {8, 6}, {6, 4},       {5, 5}, {8, 6},
                                                   {6, 4}, {2, 9}, {4, 3, 2, 2}, {9}};

MuonOptions options() { return MuonOptions(0.02).weight_decay(0.1); }

// A model and its optimizer, of which each rank has a copy.
struct Copy {
  explicit Copy(const MuonOptions& of_matrices, at::ScalarType dtype = at::kDouble) {
    torch::manual_seed(3);
    for (const auto& shape : kShapes) {
      Tensor values = torch::randn(shape, at::kDouble).to(dtype);
      if (values.dim() == 4) values = values.contiguous(at::MemoryFormat::ChannelsLast);
      parameters.push_back(values.requires_grad_());
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<Tensor>(parameters.begin(), parameters.end() - 1),
                        std::make_unique<MuonOptions>(of_matrices));
    groups.emplace_back(std::vector<Tensor>{parameters.back()},
                        std::make_unique<MuonOptions>(MuonOptions(of_matrices).orthogonalize(false)));
    optimizer = std::make_unique<Muon>(groups, of_matrices);
  }

  // In every third step one matrix sits out.
  void set_gradients(uint64_t step) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      torch::manual_seed(1000 * step + i);
      parameters[i].mutable_grad() =
          i == 2 && step % 3 == 1 ? Tensor()
                                  : torch::randn(kShapes[i], at::kDouble).to(parameters[i].scalar_type());
    }
  }

  std::vector<Tensor> parameters;
  std::unique_ptr<Muon> optimizer;
};

struct SharedRanks {
  explicit SharedRanks(int world_size, const MuonOptions& of_matrices = options(),
                       at::ScalarType dtype = at::kDouble)
      : world(Communicator::in_process(world_size)) {
    for (const auto& of_rank : world) {
      copies.emplace_back(of_matrices, dtype);
      copies.back().optimizer->share_products(of_rank);
    }
  }
  // Returns what each rank has thrown.
  std::vector<std::string> step(uint64_t step, const std::function<void(size_t rank)>& edit = nullptr) {
    for (size_t rank = 0; rank < copies.size(); ++rank) {
      copies[rank].set_gradients(step);
      if (edit) edit(rank);
    }
    return run_ranks(static_cast<int>(copies.size()),
                     [&](int rank) { copies[static_cast<size_t>(rank)].optimizer->step(); });
  }

  Ranks world;
  std::vector<Copy> copies;
};

}  // namespace

TEST_CASE("ranks that share products move every parameter as one that makes all, to the bit",
          "[muon][ranks]") {
  const std::vector<MuonOptions> all = {options(), options().normalize_rows(true),
                                        options().cautious_decay(true),
                                        options().precision(MuonPrecision::bf16), options().state_bits(8)};
  for (const int world_size : {2, 3, 7}) {
    for (size_t which = 0; which < all.size(); ++which) {
      for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
        if (dtype == at::kDouble && all[which].state_bits() == 8) continue;
        CAPTURE(world_size, which, dtype);
        Copy alone(all[which], dtype);
        SharedRanks ranks(world_size, all[which], dtype);
        for (uint64_t step = 0; step < 4; ++step) {
          alone.set_gradients(step);
          alone.optimizer->step();
          REQUIRE(first_of(ranks.step(step)).empty());
        }
        REQUIRE(same_bits(ranks.copies[0].parameters, alone.parameters));
        for (const Copy& copy : ranks.copies) {
          REQUIRE(same_bits(copy.parameters, ranks.copies[0].parameters));
          REQUIRE(first_difference(copy.optimizer->export_state(), ranks.copies[0].optimizer->export_state())
                      .empty());
        }
      }
    }
  }
}

TEST_CASE("each rank sends the matrices that it has orthogonalised, and no others", "[muon][ranks]") {
  // The dearest come first and what is left over goes to who has least: of two ranks the first takes one of {8, 6},
  // one of {6, 4} and {4, 12}; the second the other ones; {5, 5}, the third {6, 4} and {2, 9} even that out.
  SharedRanks ranks(2, options().precision(MuonPrecision::bf16), at::kFloat);
  REQUIRE(first_of(ranks.step(0)).empty());
  int64_t elements = 0;
  for (size_t i = 0; i + 1 < kShapes.size(); ++i)
    elements += std::accumulate(kShapes[i].begin(), kShapes[i].end(), int64_t{1}, std::multiplies<>());
  int64_t sent = 0;
  std::vector<int64_t> of_rank;
  for (const auto& rank : ranks.world) {
    of_rank.push_back(traffic_of(*rank, "send").bytes_sent);
    sent += of_rank.back();
  }
  CHECK(sent == 2 * elements);  // bytes of bf16
  CHECK(of_rank[0] > sent / 3);
  CHECK(of_rank[1] > sent / 3);
  REQUIRE(first_of(ranks.step(2)).empty());
  CHECK(traffic_of(*ranks.world[0], "send").bytes_sent == 2 * of_rank[0]);
}

TEST_CASE("ranks whose gradients or matrices differ are told so before anything changes", "[muon][ranks]") {
  SharedRanks ranks(2);
  const std::vector<Tensor> before = {ranks.copies[1].parameters[0].detach().clone()};
  const auto messages = ranks.step(0, [&](size_t rank) {
    if (rank == 1) ranks.copies[rank].parameters[3].mutable_grad().mul_(1 + 1e-15);
  });
  for (const std::string& message : messages) {
    CAPTURE(message);
    CHECK(contains(message, "gradient of 0.3 (which ranks that share products average first)"));
  }
  CHECK(same_bits({ranks.copies[1].parameters[0].detach()}, before));

  SharedRanks others(2);
  const auto of_others = others.step(0, [&](size_t rank) {
    if (rank == 0) others.copies[rank].parameters[1].mutable_grad().reset();
  });
  for (const std::string& message : of_others) {
    CAPTURE(message);
    CHECK(contains(message, "matrix 0.1"));
  }
}

TEST_CASE("a gradient that is not finite skips a shared step on every rank", "[muon][ranks]") {
  SharedRanks ranks(3, options().finite_check(true));
  REQUIRE(first_of(ranks.step(0)).empty());
  const Tensor before = ranks.copies[0].parameters[0].detach().clone();
  REQUIRE(first_of(ranks.step(2, [&](size_t rank) {
            ranks.copies[rank].parameters[1].mutable_grad()[0][0] = NAN;
          })).empty());
  for (Copy& copy : ranks.copies) {
    CHECK(copy.optimizer->skipped_steps() == 1);
    CHECK(same_bits(copy.parameters[0], before));
  }
}

TEST_CASE("a rank that is left alone in a shared step has changed nothing and can go on by itself",
          "[muon][ranks]") {
  SharedRanks ranks(2);
  REQUIRE(first_of(ranks.step(0)).empty());
  Copy& left = ranks.copies[0];
  NamedTensors before;
  for (const auto& [name, tensor] : left.optimizer->export_state()) before[name] = tensor.detach().clone();
  const Tensor value = left.parameters[0].detach().clone();
  left.set_gradients(2);
  const auto messages = run_ranks(2, [&](int rank) {
    if (rank == 1) return ranks.world[1]->leave("out of memory");
    left.optimizer->step();
  });
  CHECK(contains(messages[0], "out of memory"));
  CHECK(same_bits(left.parameters[0], value));
  CHECK(first_difference(left.optimizer->export_state(), before).empty());
  left.optimizer->share_products(nullptr);
  left.optimizer->step();
  CHECK_FALSE(same_bits(left.parameters[0], value));
}

TEST_CASE("shared products refuse what cannot work, and one rank has nobody to share them with",
          "[muon][ranks]") {
  SharedRanks ranks(2);
  StepInputs graph;
  graph.replayable = true;
  ranks.copies[0].set_gradients(0);
  CHECK(contains(message_of<InvalidArgument>([&] { contract(*ranks.copies[0].optimizer).prepare(graph); }),
                 "leave out the CudaGraph hook, or share_products()"));
  Copy alone(options());
  alone.optimizer->share_products(Communicator::alone(at::kCPU));
  alone.set_gradients(0);
  contract(*alone.optimizer).prepare(graph);  // is not refused
}

}  // namespace pacer::testing::muon_shared
