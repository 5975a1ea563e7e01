// A small run some of whose micro-batches have no tokens.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "support/captured_stderr.h"
#include "support/catch.h"
#include "support/session/small_run.h"

namespace pacer::testing::empty_micro_batches {

struct Trained {
  std::vector<Tensor> weights;
  NamedTensors scales;  // what Precision would save
  std::vector<double> norms;
  std::string said;
};

// Steps of windows whose micro-batches are `real` or not. A mean over no token is 0 / 0, and its gradient is
// no number either.
inline Trained trained(const std::vector<std::vector<bool>>& windows, bool by_tokens, bool in_8_bits = true,
                       at::Device device = at::kCPU) {
  SmallModel model = small_model();
  model->to(device);
  FusedAdamW optimizer(model->named_parameters(), FusedAdamWOptions(0.01));
  Trained result;
  {
    Session session(model, optimizer);
    SessionParts* parts = nullptr;
    session.use(PartsProbe(parts)).use(GradientClipping(1e9));
    session.use(GradientAccumulation(GradientAccumulationOptions(static_cast<int64_t>(windows.front().size()))
                                         .weight_by_tokens(by_tokens)));
    if (in_8_bits) session.use(Precision::fp8());
    parts->record_loss = true;
    const CapturedStderr captured;
    int64_t number = 0;
    for (const auto& window : windows) {
      for (const bool is_real : window) {
        const auto [ids, targets] = small_batch(is_real ? number : 77);
        auto [x, y] = session.begin(ids, targets);
        if (is_real) {
          ++number;
          session.backward(model->loss(x, y));
        } else {
          session.count_tokens(0);
          session.backward(model->loss(x, y) * 1e3 * std::numeric_limits<double>::quiet_NaN());
        }
        session.step();
      }
      result.norms.push_back(session.gradient_norm());
    }
    if (in_8_bits) parts->find<Precision>()->save(result.scales);
    for (auto& [name, tensor] : result.scales) tensor = tensor.clone();
    CHECK(session.skipped_steps() == 0);
    session.finish();
    result.said = captured.text();
  }
  for (const Tensor& parameter : model->parameters()) result.weights.push_back(parameter.detach().clone());
  return result;
}

}  // namespace pacer::testing::empty_micro_batches
