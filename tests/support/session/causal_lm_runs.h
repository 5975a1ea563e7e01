// Training runs of a small CausalLm by ranks that are threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include <pacer/pacer.h>

#include "support/catch.h"
#include "support/collectives/ranks.h"
#include "support/optimizers/optimizers.h"

namespace pacer::testing::causal_lm {

using modules::CausalLm;
using modules::CausalLmOptions;

constexpr int64_t kIds = 32, kLength = 16;

// What is trained: all, or adapters over weights in 32 or in 4 bits.
enum class Trains { all, lora, qlora };

// Of widths that 8-bit products can have.
inline CausalLm make_model(bool tied = false, Trains trains = Trains::all) {
  torch::manual_seed(6);
  auto options = CausalLmOptions(kIds, 32, 4, 2).ffn(32).kv_heads(1).qk_norm(true).window(AttentionWindow());
  CausalLm model(options.tied(tied));
  if (trains == Trains::all) return model;
  if (trains == Trains::qlora) modules::quantize(*model, modules::Nf4Options().targets({"layers.**"}));
  modules::add_lora(*model, modules::LoraOptions(4).targets({"layers.**"}));
  const torch::NoGradGuard no_grad;
  for (const auto& item : modules::trainable(*model)) item.value().normal_(0, 0.1);
  return model;
}

// With numbers of its own, as ranks that are threads share torch's.
inline std::pair<Tensor, Tensor> batch_of(int64_t rows, int64_t step) {
  const auto numbers = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 + step));
  const Tensor text = torch::randint(kIds, {rows, kLength + 1}, numbers, torch::kLong);
  return {text.narrow(1, 0, kLength).contiguous(), text.narrow(1, 1, kLength).contiguous()};
}

struct Trained {
  std::map<std::string, Tensor> weights;
  std::vector<double> losses;
};

inline void copy_weights(CausalLm& model, Trained& to) {
  for (const auto& item : modules::trainable(*model)) to.weights[item.key()] = item.value().detach().clone();
}

using Use = std::function<void(Session&, CausalLm&)>;

// Some steps by `ranks` threads, each with its rows of the batch; what the first one has then.
inline Trained train(const Use& use, int ranks = 1, bool tied = false, Trains trains = Trains::all,
                     const CommunicatorOptions& of_world = {}) {
  const Ranks worlds = Communicator::in_process(ranks, of_world);
  std::vector<CausalLm> models;
  for (int rank = 0; rank < ranks; ++rank) models.push_back(make_model(tied, trains));
  Trained result;
  const auto messages = run_ranks(ranks, [&](int rank) {
    CausalLm& model = models[static_cast<size_t>(rank)];
    FusedAdamW optimizer(modules::trainable(*model), FusedAdamWOptions(0.01));
    Session session(*model, optimizer, worlds[static_cast<size_t>(rank)]);
    session.use(GradientClipping(1.0));
    use(session, model);
    for (int64_t step = 0; step < 3; ++step) {
      const auto [ids, targets] = batch_of(4, step);
      const int64_t rows = 4 / ranks;
      auto [x, y] = session.begin(ids.narrow(0, rank * rows, rows), targets.narrow(0, rank * rows, rows));
      const Tensor loss = model->loss(x, y);
      session.backward(loss);
      session.step();
      if (rank == 0) result.losses.push_back(loss.item<double>());
    }
    const auto whole = session.whole_parameters();
    if (rank == 0) copy_weights(model, result);
    session.finish();
  });
  REQUIRE(first_of(messages) == "");
  for (const double loss : result.losses) REQUIRE(std::isfinite(loss));
  return result;
}

inline double largest_distance(const Trained& a, const Trained& b) {
  REQUIRE(a.weights.size() == b.weights.size());
  double largest = 0;
  for (const auto& [name, weight] : a.weights) {
    largest = std::max(largest, (weight - b.weights.at(name)).abs().max().item<double>());
  }
  return largest;
}

inline void plain(Session&, CausalLm&) {}

}  // namespace pacer::testing::causal_lm
