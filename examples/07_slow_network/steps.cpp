#include "steps.h"

#include <fstream>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include <torch/types.h>
#include <torch/utils.h>

#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/fused_adam.h>
#include <pacer/optimizers/fused_lamb.h>
#include <pacer/optimizers/muon.h>
#include <pacer/optimizers/onebit_adam.h>
#include <pacer/optimizers/onebit_lamb.h>
#include <pacer/optimizers/onebit_muon.h>

#include "sharded_step.h"
#include "support/nearest_name.h"

namespace slow_network {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;
using World = std::shared_ptr<pacer::Communicator>;

constexpr double kRate = 1e-4;

void add_layer(Shapes& shapes, std::vector<int64_t> weight, int64_t bias) {
  shapes.push_back(std::move(weight));
  shapes.push_back({bias});
}

// Radford et al. 2019; the output layer is tied to the embedding.
Shapes gpt_shapes(int64_t vocabulary, int64_t positions, int64_t width, int64_t blocks) {
  Shapes shapes = {{vocabulary, width}, {positions, width}};
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

// Devlin et al. 2019; the output layer is tied to the embedding.
Shapes bert_shapes(int64_t vocabulary, int64_t positions, int64_t width, int64_t blocks) {
  Shapes shapes = {{vocabulary, width}, {positions, width}, {2, width}};
  add_layer(shapes, {width}, width);  // layer norm
  for (int64_t block = 0; block < blocks; ++block) {
    for (int i = 0; i < 4; ++i) add_layer(shapes, {width, width}, width);  // query, key, value, output
    add_layer(shapes, {width}, width);
    add_layer(shapes, {4 * width, width}, 4 * width);  // up
    add_layer(shapes, {width, 4 * width}, width);      // down
    add_layer(shapes, {width}, width);
  }
  shapes.push_back({vocabulary});  // head: bias, transformation, layer norm
  add_layer(shapes, {width, width}, width);
  add_layer(shapes, {width}, width);
  return shapes;
}

Parameters make_parameters(const Model& model, at::Device device) {
  torch::manual_seed(1);  // every rank begins with the same values
  Parameters parameters;
  for (const auto& shape : model.shapes) {
    const auto options = torch::TensorOptions().device(device).requires_grad(true);
    parameters.emplace_back("parameter " + std::to_string(parameters.size()), torch::randn(shape, options));
  }
  return parameters;
}

std::vector<torch::Tensor> tensors_of(const Parameters& parameters) {
  std::vector<torch::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  return tensors;
}

// As backward would leave them: numbers of every rank's own.
void fill_gradients(const Parameters& parameters, int rank) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : parameters) {
    torch::Tensor& gradient = tensor.mutable_grad();
    if (!gradient.defined()) gradient = torch::empty_like(tensor);
    gradient.normal_(1e-4 * (rank + 1), 1e-3);
  }
}

// Hidden matrices by Muon's rule. Tables of embeddings come first in a model, before its first vector.
template <class Options>
std::vector<torch::optim::OptimizerParamGroup> muon_groups(const Parameters& parameters) {
  std::vector<torch::Tensor> hidden, others;
  bool is_behind_tables = false;
  for (const auto& [name, tensor] : parameters) {
    is_behind_tables = is_behind_tables || tensor.dim() < 2;
    (is_behind_tables && tensor.dim() >= 2 ? hidden : others).push_back(tensor);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(hidden, std::make_unique<Options>(kRate));
  groups.emplace_back(others, std::make_unique<Options>(Options(kRate).orthogonalize(false)));
  return groups;
}

// Gradients are averaged in buckets, as a Session does it, then the optimizer takes its step.
std::function<void()> averaged_step(const Parameters& parameters, const World& world,
                                    std::optional<at::ScalarType> wire,
                                    const std::shared_ptr<pacer::SessionOptimizer>& optimizer) {
  const auto bucketer =
      std::make_shared<pacer::GradientBucketer>(parameters, world, pacer::BucketOptions().wire_dtype(wire));
  return [bucketer, optimizer, world] {
    const torch::NoGradGuard no_grad;
    bucketer->reduce();
    bucketer->wait();
    pacer::StepInputs inputs;
    inputs.average = 1.0 / (world->world_size() * bucketer->scale());
    optimizer->prepare(inputs);
    optimizer->conclude(optimizer->enqueue());
  };
}

// After the freeze, so that momentum travels as signs.
template <class Optimizer, class Options>
std::function<void()> compressed_step(const Parameters& parameters, const World& world, Options options) {
  // A variance without a memory may freeze after one step, which is one of fp32 over a slow link.
  options.lr(kRate).betas({0.9, 0.0}).freeze_step(1);
  const auto optimizer = std::make_shared<Optimizer>(tensors_of(parameters), options, world);
  fill_gradients(parameters, world->rank());
  optimizer->step();
  return [optimizer] { optimizer->step(); };
}

template <class Optimizer, class Options>
std::function<void()> averaged_step(const Parameters& parameters, const World& world,
                                    std::optional<at::ScalarType> wire) {
  return averaged_step(parameters, world, wire,
                       std::make_shared<Optimizer>(tensors_of(parameters), Options(kRate)));
}

// It compresses from the first step on, which compares what ranks are about to do.
std::function<void()> onebit_muon_step(const Parameters& parameters, const World& world) {
  using Options = pacer::OneBitMuonOptions;
  const auto optimizer =
      std::make_shared<pacer::OneBitMuon>(muon_groups<Options>(parameters), Options(kRate), world);
  fill_gradients(parameters, world->rank());
  optimizer->step();
  return [optimizer] { optimizer->step(); };
}

// An entry of --optimizers.
struct Kind {
  std::string name, title;
  std::function<std::function<void()>(const Parameters&, const World&)> make;
  bool has_backward = false;  // which makes the gradients
};

const std::vector<Kind>& kinds() {
  using pacer::FusedAdamW, pacer::FusedAdamWOptions, pacer::FusedLamb, pacer::FusedLambOptions;
  using pacer::OneBitAdam, pacer::OneBitAdamOptions, pacer::OneBitLamb, pacer::OneBitLambOptions;
  constexpr auto kAdamW = averaged_step<FusedAdamW, FusedAdamWOptions>;
  constexpr auto kLamb = averaged_step<FusedLamb, FusedLambOptions>;
  constexpr auto kOneBitAdam = compressed_step<OneBitAdam, OneBitAdamOptions>;
  constexpr auto kWorld = pacer::ShardGroup::world;
  constexpr auto kOneBitLamb = compressed_step<OneBitLamb, OneBitLambOptions>;
  static const std::vector<Kind> all = {
      {"fp32", "FusedAdamW fp32", [=](const auto& p, const auto& w) { return kAdamW(p, w, {}); }},
      {"bf16", "FusedAdamW bf16", [=](const auto& p, const auto& w) { return kAdamW(p, w, at::kBFloat16); }},
      {"onebit", "OneBitAdam", [=](const auto& p, const auto& w) { return kOneBitAdam(p, w, {}); }},
      {"onebit-buckets", "OneBitAdam in buckets",
       [=](const auto& p, const auto& w) {
         return kOneBitAdam(p, w, OneBitAdamOptions().bucket_bytes(kBucketBytes));
       }},
      {"onebit-nodes", "OneBitAdam by nodes",
       [=](const auto& p, const auto& w) {
         return kOneBitAdam(p, w, OneBitAdamOptions().hierarchical(true));
       }},
      {"muon", "Muon fp32",
       [](const auto& p, const auto& w) {
         return averaged_step(p, w, {}, std::make_shared<pacer::Muon>(muon_groups<pacer::MuonOptions>(p)));
       }},
      {"onebit-muon", "OneBitMuon", onebit_muon_step},
      {"lamb", "FusedLamb fp32", [=](const auto& p, const auto& w) { return kLamb(p, w, {}); }},
      {"onebit-lamb", "OneBitLamb", [=](const auto& p, const auto& w) { return kOneBitLamb(p, w, {}); }},
      {"onebit-lamb-buckets", "OneBitLamb in buckets",
       [=](const auto& p, const auto& w) {
         return kOneBitLamb(p, w, OneBitLambOptions().bucket_bytes(kBucketBytes));
       }},
      {"onebit-lamb-nodes", "OneBitLamb by nodes",
       [=](const auto& p, const auto& w) {
         return kOneBitLamb(p, w, OneBitLambOptions().hierarchical(true));
       }},
      {"shards", "Shards", [](const auto& p, const auto& w) { return sharded_step(p, w, false, kWorld); },
       true},
      {"shards-nodes", "Shards in nodes",
       [](const auto& p, const auto& w) { return sharded_step(p, w, false, pacer::ShardGroup::node); }, true},
      {"shards-blocks", "Shards of blocks",
       [](const auto& p, const auto& w) { return sharded_step(p, w, true, kWorld); }, true},
  };
  return all;
}

const Kind& kind_named(const std::string& name) {
  std::vector<std::string> known;
  for (const Kind& kind : kinds()) {
    if (kind.name == name) return kind;
    known.push_back(kind.name);
  }
  throw pacer::InvalidArgument("--optimizers cannot have '" + name + "'; " +
                               examples::suggestion(name, known));
}

}  // namespace

int64_t Model::parameters() const {
  int64_t total = 0;
  for (const auto& shape : shapes) {
    total += std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }
  return total;
}

Model model_named(const std::string& name) {
  if (name == "gpt2") return {name, gpt_shapes(50257, 1024, 768, 12)};
  if (name == "bert-large") return {name, bert_shapes(30522, 512, 1024, 24)};
  if (name == "small") return {name, gpt_shapes(8192, 1024, 128, 2)};
  throw pacer::InvalidArgument("--model cannot be '" + name + "'; " +
                               examples::suggestion(name, {"gpt2", "bert-large", "small"}));
}

std::string title_of(const std::string& optimizer) { return kind_named(optimizer).title; }

int64_t bytes_over_link() {
  const char* const path = "/sys/class/net/eth0/statistics/tx_bytes";
  int64_t bytes = 0;
  std::ifstream file(path);
  pacer::require<pacer::FileError>(!(file >> bytes).fail(), "cannot read ", path,
                                   ", which says what the link that ranks share has carried");
  return bytes;
}

collectives::Way make_step(const std::string& optimizer, const Model& model, const World& world) {
  const Parameters parameters = make_parameters(model, world->device());
  collectives::Way way;
  way.name = title_of(optimizer);
  const Kind& kind = kind_named(optimizer);
  way.prepare = [parameters, world, fill = !kind.has_backward] {
    if (fill) fill_gradients(parameters, world->rank());
  };
  way.run = kind.make(parameters, world);
  return way;
}

}  // namespace slow_network
