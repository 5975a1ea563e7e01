// Runs of 1-bit optimizers whose ranks share nodes, with dictated gradients: shared out or not.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <pacer/parallel/shards.h>
#include <pacer/session/session.h>

#include "support/catch.h"
#include "support/optimizers/contract.h"
#include "support/optimizers/onebit_adam_ranks.h"
#include "support/optimizers/onebit_lamb_ranks.h"
#include "support/session/small_run.h"
#include "support/temporary_folder.h"

namespace pacer::testing::shards_onebit {

constexpr int64_t kFreeze = 4;

// A block for each parameter, whose gradient is what the batch says.
struct PieceImpl : torch::nn::Module {
  explicit PieceImpl(const Tensor& parameter) { register_parameter("w", parameter); }
  Tensor forward(Tensor gradient) { return (parameters().front().flatten() * gradient).sum(); }
};
TORCH_MODULE(Piece);

struct DictatedBlocksImpl : torch::nn::Module {
  explicit DictatedBlocksImpl(const std::vector<Tensor>& parameters) {
    for (const Tensor& parameter : parameters) {
      blocks->push_back(Piece(parameter));
      counts.push_back(parameter.numel());
    }
    register_module("blocks", blocks);
  }
  Tensor loss(const Tensor& gradients) {
    Tensor sum;
    int64_t begin = 0;
    for (size_t i = 0; i < blocks->size(); ++i) {
      const Tensor part = blocks->run(i, &PieceImpl::forward, gradients.narrow(0, begin, counts[i]));
      begin += counts[i];
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
  Blocks blocks;
  std::vector<int64_t> counts;
};
TORCH_MODULE(DictatedBlocks);

// Elements of a row of the exchange belong to one tensor each, wherever that lies.
template <class O>
GroupsOf<O> groups_of(const OptionsOf<O>& options) {
  return {{{{64, 1024}, {2048}, {128, 640}, {2, 2048}}, options},
          {{{300}}, OptionsOf<O>(options).compress(false)}};
}
template <class O>
OptionsOf<O> options_of() {
  auto options = OptionsOf<O>(0.01).freeze_step(kFreeze).weight_decay(0.1).hierarchical(true);
  return options.compress_alone(true).block_scales(true);
}

using Uses = std::function<void(Session&, DictatedBlocks&)>;

// Ranks, their models and Sessions.
template <class O>
struct Run {
  Run(int nodes, int per_node, const OptionsOf<O>& options, const Uses& use,
      at::ScalarType dtype = at::kFloat, bool compress_vectors = true)
      : ranks(nodes * per_node, groups_of<O>(options), dtype, per_node, compress_vectors) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      models.emplace_back(ranks.parameters[rank]);
      sessions.push_back(
          std::make_unique<Session>(*models.back(), *ranks.optimizers[rank], ranks.world[rank]));
      parts.emplace_back();
      sessions.back()->use(PartsProbe(parts.back()));
      use(*sessions.back(), models.back());
    }
  }
  std::string step(const std::vector<typename OneBitRanks<O>::Gradients>& micro_steps) {
    return ranks.run([&](size_t rank) {
      for (const auto& gradients : micro_steps) {
        std::vector<Tensor> flat;
        for (const Tensor& gradient : gradients[rank]) flat.push_back(gradient.flatten());
        auto [batch] = sessions[rank]->begin(at::cat(flat));
        sessions[rank]->backward(models[rank]->loss(batch));
        sessions[rank]->step();
      }
    });
  }
  std::string resume() {
    const CapturedStderr quiet;
    return ranks.run(
        [&](size_t rank) { require(sessions[rank]->resume().has_value(), "nothing to resume"); });
  }
  // Of all ranks: parameters, and on the first the optimizer's whole state.
  std::vector<NamedTensors> states() {
    std::vector<NamedTensors> all(ranks.size());
    REQUIRE(ranks.run([&](size_t rank) {
      NamedTensors state = ranks.optimizers[rank]->export_state();
      const auto* shards = parts[rank]->template find<Shards>();
      if (shards) state = shards->gather_state(std::move(state), [](const std::string&) { return 0; });
      if (rank == 0) all[0] = cloned_state(state);
      const auto whole = sessions[rank]->whole_parameters();
      for (size_t i = 0; i < ranks.parameters[rank].size(); ++i) {
        all[rank]["parameter " + std::to_string(i)] = ranks.parameters[rank][i].detach().clone();
      }
    }) == "");
    return all;
  }
  std::vector<NamedTensors> errors() {
    std::vector<NamedTensors> all;
    for (const auto& optimizer : ranks.optimizers)
      all.push_back(cloned_state(optimizer->export_rank_state()));
    return all;
  }

  OneBitRanks<O> ranks;
  std::vector<DictatedBlocks> models;
  std::vector<SessionParts*> parts;
  std::vector<std::unique_ptr<Session>> sessions;
};

inline Uses sharded(bool blocks) {
  return [blocks](Session& session, DictatedBlocks& model) {
    const auto options = ShardsOptions().over(ShardGroup::node);
    session.use(blocks ? Shards(model->blocks, options) : Shards(ShardsOptions(options).unit_bytes(100'000)));
  };
}
inline Uses both(const Uses& a, const Uses& b) {
  return [a, b](Session& session, DictatedBlocks& model) {
    a(session, model);
    b(session, model);
  };
}
inline Uses saving(const TemporaryFolder& folder, int64_t every) {
  return [path = folder.path(), every](Session& session, DictatedBlocks&) {
    session.use(Checkpoints(CheckpointsOptions(path).every(every).synchronous(true)));
  };
}
inline Uses whole() {
  return [](Session& session, DictatedBlocks&) { session.use(DataParallel()); };
}

// Sums over all ranks are exact, in whatever order; those inside a node are in rank order.
template <class O>
typename OneBitRanks<O>::Gradients gradients_of(const OneBitRanks<O>& ranks, int64_t attempt, bool exact) {
  auto gradients = ranks.gradients(attempt);
  for (auto& of_rank : gradients) {
    for (size_t i = 0; i < of_rank.size(); ++i) {
      const bool is_wide = of_rank[i].scalar_type() == at::kFloat;
      const double units = is_wide ? 256 : 16;
      const bool is_full = i + 1 == of_rank.size();  // the group that is not compressed
      if (exact || is_full || !is_wide) of_rank[i] = at::round(of_rank[i] * units) / units;
      if (attempt == 9) of_rank[i] = at::full_like(of_rank[i], std::nan(""));
    }
  }
  return gradients;
}

// The first difference between two runs over steps [first, end).
template <class O>
std::string run_beside(Run<O>& wanted, Run<O>& found, int64_t first, int64_t end, int64_t micro_steps = 1) {
  for (int64_t t = first; t < end; ++t) {
    std::vector<typename OneBitRanks<O>::Gradients> gradients;
    for (int64_t m = 0; m < micro_steps; ++m) {
      // Over micro-steps and ranks sums have another order.
      const bool exact =
          micro_steps > 1 || contract(*wanted.ranks.optimizers[0]).gradient_scope() == GradientScope::world;
      gradients.push_back(gradients_of(wanted.ranks, t * micro_steps + m + (m > 0 ? 100 : 0), exact));
    }
    for (Run<O>* run : {&wanted, &found}) {
      const std::string message = run->step(gradients);
      if (!message.empty()) return message;
    }
    const auto a = wanted.states(), b = found.states();
    for (size_t rank = 0; rank < a.size(); ++rank) {
      const std::string name = differing_name(a[rank], b[rank]);
      if (!name.empty()) return detail::concatenate(name, " of rank ", rank, " after attempt ", t);
    }
  }
  return "";
}

}  // namespace pacer::testing::shards_onebit
