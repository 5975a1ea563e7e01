#include <pacer/schedulers/layer_drop_rule.h>

#include <cmath>

#include <pacer/core/error.h>
#include <pacer/core/philox.h>

namespace pacer {
namespace {

// The counter has 24 bits for it; the 8 above say what the draw is for.
constexpr int64_t kMicroStepsEnd = int64_t{1} << 24;

void require_step(int64_t step) {
  require(step >= 0, "layer dropping was asked for step ", step, "; steps count from 0");
}

}  // namespace

double layer_drop_theta(const LayerDropOptions& options, int64_t step) {
  require_step(step);
  const double theta_bar = options.theta_bar(), gamma = options.gamma();
  require(theta_bar > 0 && theta_bar <= 1, "theta_bar of layer dropping must be in (0, 1], not ", theta_bar);
  require(gamma >= 0 && std::isfinite(gamma),
          "gamma of layer dropping must be finite and not negative, but is ", gamma);
  return (1 - theta_bar) * std::exp(-gamma * static_cast<double>(step)) + theta_bar;
}

double keep_probability(const LayerDropOptions& options, int64_t layer, int64_t layers, int64_t step) {
  require(layer >= 0 && layer < layers, "layer dropping was asked for layer ", layer, " of a stack of ",
          layers, "; layers count from 0");
  const double depth = static_cast<double>(layer + 1) / static_cast<double>(layers);
  return 1 - depth * (1 - layer_drop_theta(options, step));
}

uint64_t keep_threshold(double probability) {
  require(probability >= 0 && probability <= 1, "a layer's keep probability must be in [0, 1], not ",
          probability);
  return static_cast<uint64_t>(probability * 0x1p32);
}

uint32_t layer_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step) {
  require_step(step);
  require(layer >= 0, "layer dropping was asked for layer ", layer, "; layers count from 0");
  require(micro_step >= 0 && micro_step < kMicroStepsEnd, "layer dropping was asked for micro-step ",
          micro_step, ", but a step has at most 2^24 of them, counted from 0");
  const PhiloxCounter counter = philox_counter(static_cast<uint64_t>(layer), static_cast<uint64_t>(step),
                                               static_cast<uint32_t>(micro_step), RandomStream::layer_drop);
  return philox4x32_10(philox_key(seed), counter).word[0];
}

bool keeps_layer(const LayerDropOptions& options, int64_t layer, int64_t layers, int64_t step,
                 int64_t micro_step) {
  const double probability = keep_probability(options, layer, layers, step);
  return layer_drop_draw(options.seed(), layer, step, micro_step) < keep_threshold(probability);
}

}  // namespace pacer
