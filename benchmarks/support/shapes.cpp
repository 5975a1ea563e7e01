#include "shapes.h"

#include <functional>
#include <numeric>

namespace bench {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;

int64_t count_of(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Weight and bias of a layer.
void add_layer(Shapes& shapes, std::vector<int64_t> weight, int64_t bias) {
  shapes.push_back(std::move(weight));
  shapes.push_back({bias});
}

// Radford et al. 2019; weights lie as in the original, (in, out). The output layer is tied to the embedding.
Shapes gpt2_shapes(int64_t width, int64_t blocks) {
  constexpr int64_t kVocabulary = 50257;
  constexpr int64_t kPositions = 1024;
  Shapes shapes = {{kVocabulary, width}, {kPositions, width}};
  for (int64_t block = 0; block < blocks; ++block) {
    add_layer(shapes, {width}, width);                 // ln_1
    add_layer(shapes, {width, 3 * width}, 3 * width);  // attention: query, key, value
    add_layer(shapes, {width, width}, width);          // attention: projection
    add_layer(shapes, {width}, width);                 // ln_2
    add_layer(shapes, {width, 4 * width}, 4 * width);  // mlp: up
    add_layer(shapes, {4 * width, width}, width);      // mlp: down
  }
  add_layer(shapes, {width}, width);  // ln_f
  return shapes;
}

// Devlin et al. 2019.
Shapes bert_shapes(int64_t width, int64_t blocks) {
  constexpr int64_t kVocabulary = 30522;
  constexpr int64_t kPositions = 512;
  constexpr int64_t kSegments = 2;
  Shapes shapes = {{kVocabulary, width}, {kPositions, width}, {kSegments, width}};
  add_layer(shapes, {width}, width);  // layer norm of the embeddings
  for (int64_t block = 0; block < blocks; ++block) {
    for (int i = 0; i < 4; ++i) add_layer(shapes, {width, width}, width);  // query, key, value, output
    add_layer(shapes, {width}, width);                                     // layer norm
    add_layer(shapes, {4 * width, width}, 4 * width);                      // up
    add_layer(shapes, {width, 4 * width}, width);                          // down
    add_layer(shapes, {width}, width);                                     // layer norm
  }
  shapes.push_back({kVocabulary});  // head: bias of the tied output layer
  add_layer(shapes, {width, width}, width);
  add_layer(shapes, {width}, width);
  return shapes;
}

}  // namespace

int64_t ModelShapes::parameters() const {
  int64_t total = 0;
  for (const auto& shape : shapes) total += count_of(shape);
  return total;
}

std::vector<int64_t> ModelShapes::counts() const {
  std::vector<int64_t> counts;
  for (const auto& shape : shapes) counts.push_back(count_of(shape));
  return counts;
}

ModelShapes gpt2() { return {"gpt2", "GPT-2", gpt2_shapes(768, 12)}; }
ModelShapes gpt2_xl() { return {"gpt2-xl", "GPT-2 XL", gpt2_shapes(1600, 48)}; }
ModelShapes bert_large() { return {"bert-large", "BERT-large", bert_shapes(1024, 24)}; }
ModelShapes one_tensor() { return {"one-tensor", "one tensor", {{1'000'000'000}}}; }
ModelShapes many_small() { return {"many-small", "10,000 x 64", Shapes(10'000, {64})}; }

}  // namespace bench
