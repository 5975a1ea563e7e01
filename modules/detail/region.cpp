#include <pacer/modules/detail/region.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

Tensors distinct_parameters(const torch::nn::Module& module) {
  Tensors distinct;
  std::unordered_set<const void*> seen;
  for (at::Tensor& parameter : module.parameters()) {
    if (parameter.defined() && seen.insert(parameter.unsafeGetTensorImpl()).second) {
      distinct.push_back(std::move(parameter));
    }
  }
  return distinct;
}

std::vector<at::Device> gpus_of(const Tensors& parameters, const Tensors& x) {
  std::vector<at::Device> gpus;
  for (const Tensors* tensors : {&parameters, &x}) {
    for (const at::Tensor& tensor : *tensors) {
      if (!tensor.is_cuda()) continue;
      if (std::find(gpus.begin(), gpus.end(), tensor.device()) == gpus.end()) gpus.push_back(tensor.device());
    }
  }
  return gpus;
}

// The parameter's name in the module, where the module is known.
std::string name_of(const torch::nn::Module* module, const at::Tensor& parameter) {
  if (module != nullptr) {
    for (const auto& item : module->named_parameters()) {
      if (item.value().is_same(parameter)) return item.key();
    }
  }
  return concatenate("of shape ", parameter.sizes());
}

// Hooks of parameters (register_hook) see the gradient where it arrives, once, and not on its way there.
class HooksAside {
 public:
  explicit HooksAside(const Tensors& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.requires_grad()) continue;
      Hooks& hooks = torch::autograd::impl::hooks(parameter);
      if (!hooks.empty()) aside_.emplace_back(parameter, std::exchange(hooks, {}));
    }
  }
  HooksAside(const HooksAside&) = delete;
  ~HooksAside() {
    for (auto& [parameter, hooks] : aside_) torch::autograd::impl::hooks(parameter) = std::move(hooks);
  }

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> aside_;
};

}  // namespace

Region::Region(torch::nn::Module& module, std::string name, TensorFunction f, const Tensors& x,
               const KeptOperators& kept)
    : name_(std::move(name)),
      f_(std::move(f)),
      module_(module.weak_from_this().lock()),
      was_training_(module.is_training()),
      parameters_(distinct_parameters(module)),
      buffers_(module),
      context_(CallContext::now(gpus_of(parameters_, x))),
      memory_(name_, kept.list()) {
  for (const at::Tensor& parameter : parameters_) versions_.push_back(parameter._version());
}

Tensors Region::run_first(const Tensors& x) {
  std::vector<int64_t> versions;
  for (const at::Tensor& tensor : x) versions.push_back(tensor._version());
  const NoAutocastCache no_cache;
  Tensors y;
  {
    const ReplayMemory::Scope scope(memory_);
    y = f_(x);
    memory_.end_first_run(y);
  }
  for (size_t i = 0; i < x.size(); ++i) {
    require(x[i]._version() == versions[i], name_, " changes its argument ", i,
            " in place, so it cannot be recomputed from it; let it work on a copy");
  }
  buffers_.keep_changed();
  results_ = DefinedMask(y);
  return results_.compact(std::move(y));
}

void Region::check_unchanged() const {
  require(
      module_ == nullptr || module_->is_training() == was_training_, name_, " was switched to ",
      was_training_ ? "eval()" : "train()",
      " between forward and backward, so recomputing it would give something else; switch after backward");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    require(
        parameters_[i]._version() == versions_[i], name_, ": parameter ",
        name_of(module_.get(), parameters_[i]),
        " was changed in place between forward and backward, so recomputing the block would give something "
        "else; change it after backward");
  }
  const std::string buffer = buffers_.changed_by_others();
  require(buffer.empty(), name_, ": buffer ", buffer,
          " was changed between forward and backward, so recomputing the block would give something else; "
          "change it after backward");
}

Tensors Region::checked_results(Tensors y, const Tensors& gradients) const {
  const DefinedMask found(y);
  require(found == results_, name_, " returned ", results_.size(), " tensors in forward, and ", found.size(),
          " or others when it was recomputed; it depends on something that is neither an argument nor state");
  y = found.compact(std::move(y));
  for (size_t i = 0; i < y.size(); ++i) {
    require(!gradients[i].defined() || y[i].sizes() == gradients[i].sizes(), name_, ": its result ", i,
            " has shape ", gradients[i].sizes(), " in forward, but ", y[i].sizes(),
            " when it was recomputed; it depends on something that is neither an argument nor state");
  }
  return y;
}

// All leaves of the second run must be arguments or parameters, or a gradient would get lost without a word.
void Region::check_reach(const Tensors& y, const Tensors& x) const {
  std::unordered_set<const void*> known;
  for (const Tensors* tensors : {&x, &parameters_}) {
    for (const at::Tensor& tensor : *tensors) known.insert(tensor.unsafeGetTensorImpl());
  }
  const auto check = [&](const at::Tensor& leaf) {
    require(
        known.count(leaf.unsafeGetTensorImpl()) != 0, name_, " reads a tensor of shape ", leaf.sizes(),
        " that needs a gradient and is neither among its arguments nor one of its parameters, so recomputing "
        "the block would lose that gradient; pass it as an argument");
  };
  std::unordered_set<const Node*> seen;
  std::vector<Node*> waiting;
  for (const at::Tensor& result : y) {
    if (!result.requires_grad()) continue;
    if (result.grad_fn())
      waiting.push_back(result.grad_fn().get());
    else
      check(result);
  }
  while (!waiting.empty()) {
    Node* node = waiting.back();
    waiting.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) check(leaf->variable);
    // No node is null, although one is cast. NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage)
    for (const auto& edge : node->next_edges()) {
      if (edge.function) waiting.push_back(edge.function.get());
    }
  }
}

void Region::replay(const Tensors& x) {
  if (replay_) return;
  check_unchanged();
  auto replay = std::make_unique<Replay>(buffers_);
  for (const at::Tensor& tensor : x) {
    replay->leaves.push_back(tensor.detach().set_requires_grad(tensor.requires_grad()));
  }
  struct Back {
    CallContext surroundings;
    ~Back() { surroundings.enter(); }
  } const back{CallContext::now(context_.gpus())};
  context_.enter();
  const at::AutoGradMode with_grad(true);
  const NoAutocastCache no_cache;
  // Outside a backward pass this one is still to come, and says then whether it is the last.
  memory_.kept().begin_second_run(/*stays=*/torch::autograd::get_current_graph_task_keep_graph());
  const ReplayMemory::Scope scope(memory_);
  replay->y = f_(replay->leaves);
  require(
      memory_.end_second_run(replay->y), name_,
      " returned what its last layer gave in forward, and something else when it was recomputed; it depends "
      "on something that is neither an argument nor state");
  replay_ = std::move(replay);
}

Tensors Region::run_again(const Tensors& x, const Tensors& gradients, const std::vector<bool>& is_needed) {
  require(!at::GradMode::is_enabled(), name_,
          " is recomputed, so its gradient has no second derivative (create_graph); leave this block alone");
  replay(x);
  if (!torch::autograd::get_current_graph_task_keep_graph()) memory_.kept().forget();
  const std::unique_ptr<Replay> replay = std::move(replay_);
  Tensors leaves = std::move(replay->leaves), y = std::move(replay->y);
  y = checked_results(std::move(y), gradients);
  check_reach(y, leaves);
  Tensors roots, seeds, wanted;
  for (size_t i = 0; i < y.size(); ++i) {
    if (!gradients[i].defined() || !y[i].requires_grad()) continue;
    roots.push_back(y[i]);
    seeds.push_back(gradients[i]);
  }
  y.clear();
  Tensors all = std::move(leaves);
  all.insert(all.end(), parameters_.begin(), parameters_.end());
  std::vector<size_t> places;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!is_needed[i] || !all[i].requires_grad()) continue;
    wanted.push_back(all[i]);
    places.push_back(i);
  }
  Tensors result(all.size());
  if (roots.empty() || wanted.empty()) return result;
  const HooksAside aside(parameters_);
  Tensors found = torch::autograd::grad(roots, wanted, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                        /*allow_unused=*/true);
  for (size_t i = 0; i < places.size(); ++i) result[places[i]] = std::move(found[i]);
  return result;
}

}  // namespace pacer::detail
