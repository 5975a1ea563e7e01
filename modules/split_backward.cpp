#include <pacer/modules/split_backward.h>

#include <memory>
#include <utility>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/autograd_node.h>
#include <pacer/modules/detail/input_path.h>

namespace pacer {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

Edge gradient_edge(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor) : Edge();
}

// The root of the weight half. It gives its gradients away, so that each is freed as soon as it was used; the
// engine's own root would hold them to the end.
struct WeightHalfRoot : torch::autograd::Node {
  WeightHalfRoot(edge_list starts, variable_list gradients, const at::Tensor& seed)
      : Node(std::move(starts)), gradients_(std::move(gradients)) {
    add_input_metadata(seed);
  }
  variable_list apply(variable_list&& /*seed*/) override { return std::move(gradients_); }

 private:
  variable_list gradients_;
};

}  // namespace

SplitBackward::SplitBackward(const Tensors& outputs, const Tensors& inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    require(!inputs[i].defined() || inputs[i].is_leaf(), "SplitBackward: input ", i, ", of shape ",
            inputs[i].defined() ? inputs[i].sizes() : at::IntArrayRef(),
            ", was computed from other tensors; give the stage input.detach().requires_grad_()");
    inputs_.push_back(gradient_edge(inputs[i]));
  }
  for (const at::Tensor& output : outputs) {
    outputs_.push_back(
        {gradient_edge(output), output.defined() ? output.sizes().vec() : std::vector<int64_t>()});
  }
}

void SplitBackward::check(const Tensors& gradients) const {
  require(
      next_ == Next::input_half,
      "SplitBackward::input_half ran before, and its graph is used up; run the stage's forward pass again");
  require(gradients.size() == outputs_.size(), "SplitBackward::input_half got ", gradients.size(),
          " gradients for ", outputs_.size(), " outputs; give one for each, undefined where there is none");
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !outputs_[i].edge.is_valid()) continue;
    require(gradients[i].sizes() == outputs_[i].sizes, "SplitBackward::input_half: output ", i, " has shape ",
            at::IntArrayRef(outputs_[i].sizes), ", but its gradient has shape ", gradients[i].sizes());
  }
}

Tensors SplitBackward::input_half(const Tensors& gradients) {
  check(gradients);
  next_ = Next::nothing;
  const std::vector<Output> outputs = std::exchange(outputs_, {});
  const Edges inputs = std::exchange(inputs_, {});

  edge_list all_roots;
  for (const Output& output : outputs) all_roots.push_back(output.edge);
  detail::InputPath path(all_roots, inputs);
  edge_list roots, starts;
  variable_list seeds, kept;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined() || !outputs[i].edge.is_valid()) continue;
    const bool is_on_path = path.holds(outputs[i].edge);
    (is_on_path ? roots : starts).push_back(outputs[i].edge);
    (is_on_path ? seeds : kept).push_back(gradients[i]);
  }

  Tensors result(inputs.size());
  if (!roots.empty()) {
    edge_list wanted = path.handed_over();
    std::vector<size_t> places;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].is_valid()) continue;
      wanted.push_back(inputs[i]);
      places.push_back(i);
    }
    variable_list found =
        Engine::get_default_engine().execute(roots, seeds, /*keep_graph=*/true, /*create_graph=*/false,
                                             /*accumulate_grad=*/false, wanted);
    for (size_t i = 0; i < places.size(); ++i) {
      result[places[i]] = std::move(found[path.handed_over().size() + i]);
    }
    found.resize(path.handed_over().size());
    path.take_kept(std::move(found), starts, kept);
  }
  starts_ = std::move(starts);
  kept_ = std::move(kept);
  next_ = Next::weight_half;
  return result;
}

void SplitBackward::weight_half() {
  require(next_ == Next::weight_half, "SplitBackward::weight_half was called ",
          next_ == Next::input_half
              ? "before input_half; call that first"
              : "twice, or after a half that threw; run the stage's forward pass again");
  next_ = Next::nothing;
  edge_list starts = std::exchange(starts_, {});
  variable_list kept = std::exchange(kept_, {});
  if (starts.empty()) return;
  const at::Tensor seed = at::empty({0}, at::TensorOptions(kept.front().device()));
  const auto root = detail::make_node<WeightHalfRoot>(std::move(starts), std::move(kept), seed);
  Engine::get_default_engine().execute({Edge(root, 0)}, {seed}, /*keep_graph=*/false, /*create_graph=*/false,
                                       /*accumulate_grad=*/true);
}

}  // namespace pacer
