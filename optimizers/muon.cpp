#include <pacer/optimizers/muon.h>

#include <algorithm>
#include <set>

#include <torch/nn/module.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/modules/embedding.h>
#include <pacer/modules/with_head.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/step_agreement.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer {
namespace {

// The parameters of all embeddings.
std::set<const void*> embedded(const torch::nn::Module& model) {
  std::set<const void*> found;
  for (const auto& module : model.modules()) {
    if (!modules::is_embedding(*module)) continue;
    for (const auto& parameter : module->parameters()) found.insert(parameter.unsafeGetTensorImpl());
  }
  return found;
}

// Of modules that tell their head.
std::set<const void*> heads(const torch::nn::Module& model) {
  std::set<const void*> found;
  for (const auto& module : model.modules()) {
    const auto* const with_head = dynamic_cast<const modules::WithHead*>(module.get());
    if (with_head != nullptr) found.insert(with_head->head_weight().unsafeGetTensorImpl());
  }
  return found;
}

bool begins_with_any(const std::string& name, const std::vector<std::string>& beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(),
                     [&](const std::string& beginning) { return name.rfind(beginning, 0) == 0; });
}

}  // namespace

void Muon::share_products(std::shared_ptr<Communicator> ranks) {
  require(!is_shared_out(), traits().name, ": a Session with Shards has dealt out the products already");
  if (ranks == nullptr || ranks->world_size() == 1) return engine().share_products(nullptr);
  for (const auto& group : param_groups_) {
    for (const torch::Tensor& parameter : group.params()) {
      detail::require_joined_on(parameter.device(), traits().name, *ranks);
    }
  }
  engine().share_products(std::make_unique<detail::ProductShare>(std::move(ranks)));
}

void Muon::prepare(const StepInputs& inputs) {
  if (const detail::ProductShare* const products = engine().products()) {
    const at::Device device = products->ranks().device();
    require(!inputs.replayable && !(device.is_cuda() && detail::is_capturing(device)), traits().name,
            ": ranks that share the products talk to each other in the middle of a step, which cannot be "
            "replayed from a CUDA graph; leave out the CudaGraph hook, or share_products()");
  }
  FusedOptimizer::prepare(inputs);
}

void Muon::update_only(const ParameterRanges& ranges, std::shared_ptr<Communicator> ranks) {
  FusedOptimizer::update_only(ranges, ranks);
  engine().share_products(std::make_unique<detail::ProductShare>(std::move(ranks)));
}

namespace {

template <class Options>
std::vector<NamedParamGroup> sorted_groups(const torch::nn::Module& model, const Options& options,
                                           const std::vector<std::string>& adamw) {
  const std::set<const void*> of_embeddings = embedded(model);
  std::set<const void*> of_heads = heads(model);
  NamedParameters trained, matrices, rest;
  std::set<const void*> seen;
  const void* last = nullptr;
  for (const auto& item : model.named_parameters()) {
    const void* const tensor = item.value().unsafeGetTensorImpl();
    if (!item.value().requires_grad() || !seen.insert(tensor).second) continue;
    trained.insert(item.key(), item.value());
    if (item.value().dim() >= 2) last = tensor;
  }
  if (of_heads.empty()) of_heads.insert(last);
  for (const auto& item : trained) {
    const void* const tensor = item.value().unsafeGetTensorImpl();
    const bool is_matrix = item.value().dim() >= 2 && of_heads.count(tensor) == 0 &&
                           of_embeddings.count(tensor) == 0 && !begins_with_any(item.key(), adamw);
    (is_matrix ? matrices : rest).insert(item.key(), item.value());
  }
  std::vector<NamedParamGroup> groups;
  const auto add = [&](const NamedParameters& parameters, bool orthogonalize) {
    if (parameters.is_empty()) return;
    groups.emplace_back(parameters, std::make_unique<Options>(Options(options).orthogonalize(orthogonalize)));
  };
  add(matrices, true);
  add(rest, false);
  return groups;
}

// Of a group without options, too.
bool is_orthogonalized(const torch::optim::OptimizerOptions* options) {
  if (const auto* muon = dynamic_cast<const MuonOptions*>(options)) return muon->orthogonalize();
  const auto* onebit = dynamic_cast<const OneBitMuonOptions*>(options);
  return onebit == nullptr || onebit->orthogonalize();
}

}  // namespace

std::vector<NamedParamGroup> muon_groups(const torch::nn::Module& model, const MuonOptions& options,
                                         const std::vector<std::string>& adamw) {
  return sorted_groups(model, options, adamw);
}
std::vector<NamedParamGroup> muon_groups(const torch::nn::Module& model, const OneBitMuonOptions& options,
                                         const std::vector<std::string>& adamw) {
  return sorted_groups(model, options, adamw);
}

std::string describe_muon_groups(const std::vector<NamedParamGroup>& groups) {
  std::string text;
  for (const NamedParamGroup& group : groups) {
    text += is_orthogonalized(group.options.get()) ? "Muon:" : "AdamW:";
    for (const auto& item : group.parameters) text += " " + item.key();
    text += "\n";
  }
  return text;
}

}  // namespace pacer
