#include "models.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "support/shapes.h"

namespace bench::muon {
namespace {

// Weights lie as linear layers have them, (out, in). peer.py builds the same.
Model gpt_of(const std::string& name, int64_t layers, int64_t width, int64_t length, int64_t vocabulary) {
  const auto add = [](Shapes& to, const Shapes& more) { to.insert(to.end(), more.begin(), more.end()); };
  Model model{name, {}, {{vocabulary, width}, {length, width}}};
  for (int64_t layer = 0; layer < layers; ++layer) {
    add(model.hidden, {{3 * width, width}, {width, width}, {4 * width, width}, {width, 4 * width}});
    add(model.rest, Shapes(4, {width}));                            // the two layer norms
    add(model.rest, {{3 * width}, {width}, {4 * width}, {width}});  // biases
  }
  add(model.rest, {{width}, {width}, {vocabulary, width}});  // last norm, head
  return model;
}

}  // namespace

std::vector<MatrixCount> Model::matrices() const {
  std::vector<MatrixCount> found;
  for (const auto& shape : hidden) {
    const auto same = std::find_if(found.begin(), found.end(), [&](const MatrixCount& other) {
      return other.rows == shape[0] && other.columns == shape[1];
    });
    if (same == found.end()) {
      found.push_back({shape[0], shape[1], 1});
    } else {
      ++same->count;
    }
  }
  return found;
}

int64_t elements_of(const Shapes& shapes) {
  int64_t total = 0;
  for (const auto& shape : shapes) {
    total += std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
  return total;
}

double operations_of(const Model& model, int64_t iterations) {
  double total = 0;
  for (const MatrixCount& matrices : model.matrices()) {
    const auto r = static_cast<double>(std::min(matrices.rows, matrices.columns));
    const auto c = static_cast<double>(std::max(matrices.rows, matrices.columns));
    total += static_cast<double>(matrices.count * iterations) * (4 * r * r * c + 2 * r * r * r);
  }
  return total;
}

Model gpt() { return gpt_of("gpt", /*layers=*/24, /*width=*/2048, /*length=*/1024, /*vocabulary=*/32768); }

Model gpt2_small() {
  constexpr size_t kEmbeddings = 2;  // which come first
  Model model{"gpt2", {}, {}};
  const Shapes all = gpt2().shapes;
  for (size_t i = 0; i < all.size(); ++i) {
    (i >= kEmbeddings && all[i].size() == 2 ? model.hidden : model.rest).push_back(all[i]);
  }
  return model;
}

Model tiny() { return gpt_of("tiny", /*layers=*/2, /*width=*/128, /*length=*/64, /*vocabulary=*/256); }

}  // namespace bench::muon
