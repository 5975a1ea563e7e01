#include <pacer/schedulers/layer_drop_rule.h>

#include <cmath>

#include <pacer/core/error.h>
#include <pacer/core/philox.h>

namespace pacer {
namespace {

// The counter has 24 bits for it; the 8 above say what the draw is for.
constexpr int64_t kMicroStepsEnd = int64_t{1} << 24;
// The 64 bits of the index hold a layer, a rank and a group of four rows.
constexpr int kLayerBits = 16, kRankBits = 20, kGroupBits = 28;
constexpr int64_t kRowsOfDraw = 4;
constexpr int64_t kLayersEnd = int64_t{1} << kLayerBits, kRanksEnd = int64_t{1} << kRankBits;
constexpr int64_t kRowsEnd = kRowsOfDraw << kGroupBits;

void require_step(int64_t step) {
  require(step >= 0, "layer dropping was asked for step ", step, "; steps count from 0");
}

void require_draw(int64_t layer, int64_t step, int64_t micro_step) {
  require_step(step);
  require(layer >= 0, "layer dropping was asked for layer ", layer, "; layers count from 0");
  require(micro_step >= 0 && micro_step < kMicroStepsEnd, "layer dropping was asked for micro-step ",
          micro_step, ", but a step has at most 2^24 of them, counted from 0");
}

void require_options(const LayerDropOptions& options) {
  const double theta_bar = options.theta_bar(), gamma = options.gamma().value_or(0);
  require(theta_bar > 0 && theta_bar <= 1, "theta_bar of layer dropping must be in (0, 1], not ", theta_bar);
  require(gamma >= 0 && std::isfinite(gamma),
          "gamma of layer dropping must be finite and not negative, but is ", gamma);
  require(!options.gamma() || !options.schedule(),
          "layer dropping was given gamma and schedule; give the one that theta shall follow");
  require(options.depth().has_value() + options.last_layers().has_value() + options.shares().has_value() <= 1,
          "layer dropping was given more than one of depth, last_layers and shares; give the one that says "
          "which layers are dropped");
  require(!options.last_layers() || *options.last_layers() >= 1,
          "last_layers of layer dropping must be at least 1, not ", options.last_layers().value_or(0));
  if (!options.shares()) return;
  for (const double share : *options.shares()) {
    require(share >= 0 && share <= 1, "shares of layer dropping must be in [0, 1], not ", share);
  }
}

double share_of(DropDepth depth, int64_t layer, int64_t layers) {
  const double below = layers == 1 ? 0 : static_cast<double>(layer) / static_cast<double>(layers - 1);
  switch (depth) {
    case DropDepth::linear:
      return static_cast<double>(layer + 1) / static_cast<double>(layers);
    case DropDepth::from_zero:
      return below;
    case DropDepth::uniform:
      return 1;
    case DropDepth::exponential:
      return std::exp2(below) - 1;
  }
  throw InvalidArgument("layer dropping was given a depth that does not exist; give one of DropDepth");
}

// The draws of rows 4 group to 4 group + 3.
PhiloxCounter row_draws(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step, int64_t rank,
                        int64_t group) {
  const uint64_t index = (static_cast<uint64_t>(layer) << (kRankBits + kGroupBits)) +
                         (static_cast<uint64_t>(rank) << kGroupBits) + static_cast<uint64_t>(group);
  const PhiloxCounter counter = philox_counter(index, static_cast<uint64_t>(step),
                                               static_cast<uint32_t>(micro_step), RandomStream::row_drop);
  return philox4x32_10(philox_key(seed), counter);
}

void require_rows(int64_t layer, int64_t step, int64_t micro_step, int64_t rank, int64_t rows) {
  require_draw(layer, step, micro_step);
  require(layer < kLayersEnd, "layer dropping by sample was asked for layer ", layer,
          ", but a stack has at most 2^16 of them");
  require(rank >= 0 && rank < kRanksEnd, "layer dropping by sample was asked for rank ", rank,
          ", but there are at most 2^20 of them, counted from 0");
  require(rows >= 0 && rows <= kRowsEnd, "layer dropping by sample was asked for ", rows,
          " rows, but a micro-batch has from 0 to 2^30 of them");
}

}  // namespace

double layer_drop_theta(const LayerDropOptions& options, const Progress& progress) {
  require_step(progress.step);
  require_options(options);
  const double theta_bar = options.theta_bar(), gamma = options.gamma().value_or(1e-3);
  if (options.schedule()) return 1 - (1 - theta_bar) * options.schedule()->factor(progress);
  return (1 - theta_bar) * std::exp(-gamma * static_cast<double>(progress.step)) + theta_bar;
}

double depth_share(const LayerDropOptions& options, int64_t layer, int64_t layers) {
  require(layer >= 0 && layer < layers, "layer dropping was asked for layer ", layer, " of a stack of ",
          layers, "; layers count from 0");
  require_options(options);
  if (const auto& shares = options.shares()) {
    require(static_cast<int64_t>(shares->size()) == layers, "shares of layer dropping has ", shares->size(),
            " numbers, but the stack has ", layers, " layers; give one for each layer");
    return (*shares)[static_cast<size_t>(layer)];
  }
  if (const auto& last = options.last_layers()) {
    require(*last <= layers, "last_layers of layer dropping is ", *last, ", but the stack has ", layers,
            " layers; give at most these");
    return layer >= layers - *last ? 1 : 0;
  }
  return share_of(options.depth().value_or(DropDepth::linear), layer, layers);
}

double keep_probability(const LayerDropOptions& options, int64_t layer, int64_t layers,
                        const Progress& progress) {
  return 1 - depth_share(options, layer, layers) * (1 - layer_drop_theta(options, progress));
}

uint64_t keep_threshold(double probability) {
  require(probability >= 0 && probability <= 1, "a layer's keep probability must be in [0, 1], not ",
          probability);
  return static_cast<uint64_t>(probability * 0x1p32);
}

uint32_t layer_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step) {
  require_draw(layer, step, micro_step);
  const PhiloxCounter counter = philox_counter(static_cast<uint64_t>(layer), static_cast<uint64_t>(step),
                                               static_cast<uint32_t>(micro_step), RandomStream::layer_drop);
  return philox4x32_10(philox_key(seed), counter).word[0];
}

bool keeps_layer(const LayerDropOptions& options, int64_t layer, int64_t layers, const Progress& progress) {
  const double probability = keep_probability(options, layer, layers, progress);
  return layer_drop_draw(options.seed(), layer, progress.step, progress.micro_step) <
         keep_threshold(probability);
}

uint32_t row_drop_draw(uint64_t seed, int64_t layer, int64_t step, int64_t micro_step, int64_t rank,
                       int64_t row) {
  require(row >= 0 && row < kRowsEnd, "layer dropping by sample was asked for row ", row,
          ", but a micro-batch has at most 2^30 of them, counted from 0");
  require_rows(layer, step, micro_step, rank, row);
  return row_draws(seed, layer, step, micro_step, rank, row / kRowsOfDraw).word[row % kRowsOfDraw];
}

std::vector<bool> keeps_rows(const LayerDropOptions& options, int64_t layer, int64_t layers,
                             const Progress& progress, int64_t rank, int64_t rows) {
  const uint64_t threshold = keep_threshold(keep_probability(options, layer, layers, progress));
  require_rows(layer, progress.step, progress.micro_step, rank, rows);
  std::vector<bool> kept(static_cast<size_t>(rows));
  for (int64_t first = 0; first < rows; first += kRowsOfDraw) {
    const PhiloxCounter draws =
        row_draws(options.seed(), layer, progress.step, progress.micro_step, rank, first / kRowsOfDraw);
    for (int64_t row = first; row < rows && row < first + kRowsOfDraw; ++row) {
      kept[static_cast<size_t>(row)] = draws.word[row - first] < threshold;
    }
  }
  return kept;
}

}  // namespace pacer
