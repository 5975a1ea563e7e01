// 1-bit optimizers in Sessions, one for each rank, whose gradients the batches dictate; and the norm by which
// they are clipped.
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <pacer/session/session.h>

#include "support/kernels/onebit_exchange.h"
#include "support/optimizers/onebit_gradients.h"
#include "support/optimizers/onebit_ranks.h"

namespace pacer::testing {

// Parameters whose gradients are what the batch says.
struct DictatedImpl : torch::nn::Module {
  explicit DictatedImpl(const std::vector<Tensor>& parameters) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      register_parameter("w" + std::to_string(i), parameters[i]);
    }
  }
  Tensor loss(const Tensor& gradients) {
    Tensor sum;
    int64_t begin = 0;
    for (const Tensor& p : parameters()) {
      const Tensor part = (p.flatten() * gradients.narrow(0, begin, p.numel())).sum();
      begin += p.numel();
      sum = sum.defined() ? sum + part : part;
    }
    return sum;
  }
};
TORCH_MODULE(Dictated);

inline Tensor joined(const std::vector<Tensor>& gradients) {
  std::vector<Tensor> flat;
  for (const Tensor& g : gradients) flat.push_back(g.flatten());
  return at::cat(flat);
}

struct Sessions {
  std::vector<Dictated> models;
  std::vector<std::unique_ptr<Session>> of_rank;

  template <class OneBit>
  Sessions(OneBit& ranks, const std::function<void(Session&)>& use) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      models.emplace_back(ranks.parameters[rank]);
      of_rank.push_back(
          std::make_unique<Session>(*models.back(), *ranks.optimizers[rank], ranks.world[rank]));
      use(*of_rank.back());
    }
  }
  // gradients: [micro-step][rank][parameter]
  template <class OneBit>
  std::string step(OneBit& ranks, const std::vector<typename OneBit::Gradients>& gradients) {
    return ranks.run([&](size_t rank) {
      for (const auto& micro_step : gradients) {
        auto [batch] = of_rank[rank]->begin(joined(micro_step[rank]));
        of_rank[rank]->backward(models[rank]->loss(batch));
        of_rank[rank]->step();
      }
    });
  }
  template <class OneBit>
  std::string finish(OneBit& ranks) {
    return ranks.run([&](size_t rank) { of_rank[rank]->finish(); });
  }
};

inline double square_of(const std::vector<float>& gradient) {
  return TextbookExchange::sum(gradient, 0, gradient.size(), false);
}

// N of section "clipping": over compressed parameters all ranks' own gradients, as if their noise cancelled,
// else the mean gradient.
template <class Textbook>
double clipping_norm(const Textbook& textbook, const TextbookGradients& gradients) {
  const auto ranks = static_cast<double>(gradients.size());
  double own = 0, mean = 0;
  for (size_t i = 0; i < textbook.parameters.size(); ++i) {
    if (textbook.parameters[i].compress && textbook.exchanges_next()) {
      for (const auto& of_rank : gradients) own += square_of(*of_rank[i]) / (ranks * ranks);
      continue;
    }
    auto sum = *gradients[0][i];
    for (size_t rank = 1; rank < gradients.size(); ++rank) {
      for (size_t k = 0; k < sum.size(); ++k) sum[k] += (*gradients[rank][i])[k];
    }
    mean += square_of(sum) / (ranks * ranks);
  }
  return std::sqrt(own + mean);
}

}  // namespace pacer::testing
