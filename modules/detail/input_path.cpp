#include <pacer/modules/detail/input_path.h>

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <pacer/modules/detail/product_nodes.h>

namespace pacer::detail {

struct InputPath::KeepGradients : torch::autograd::FunctionPreHook {
  explicit KeepGradients(Split& split) : split_(split) {}
  Gradients operator()(const Gradients& gradients) override { return split_.gradients = gradients; }

 private:
  Split& split_;
};

struct InputPath::ReleaseVariables : torch::autograd::FunctionPostHook {
  explicit ReleaseVariables(Node& node) : node_(node) {}
  Gradients operator()(const Gradients& results, const Gradients& /*gradients*/) override {
    node_.release_variables();
    return results;
  }

 private:
  Node& node_;
};

// Stands at the end of edges that lead off the path. The first half stops at it; in the second it runs when
// the node before it would have, so that sums have their order.
struct InputPath::Substitute : Node {
  Substitute(const Node& before, Edges next) : Node(before.sequence_nr(), std::move(next)) {
    for (const Edge& edge : next_edges()) {
      input_metadata_.push_back(edge.function->input_metadata(edge.input_nr));
    }
  }
  Gradients apply(Gradients&& gradients) override { return std::move(gradients); }
};

InputPath::InputPath(const Edges& outputs, const Edges& inputs) {
  for (const Edge& input : inputs) {
    if (input.is_valid()) leads_to_input_[input.function.get()] = true;
  }
  for (const Edge& output : outputs) {
    if (output.is_valid()) explore(output.function.get());
  }
  for (const auto& node : path_) {
    const std::vector<size_t> off = edges_off(*node);
    if (!off.empty() && is_product(*node)) {
      splits_.push_back(std::make_unique<Split>(Split{node, {}}));
      node->add_pre_hook(std::make_unique<KeepGradients>(*splits_.back()));
      continue;
    }
    if (!off.empty()) substitute(*node, off);
    release_hooks_[node.get()] = node->add_post_hook(std::make_unique<ReleaseVariables>(*node));
  }
}

InputPath::~InputPath() {
  for (const auto& split : splits_) {
    // The user's hooks have run, and would run again in the second half.
    split->node->pre_hooks().clear();
    split->node->tensor_pre_hooks().clear();
    split->node->retains_grad_hooks().clear();
    for (Edge& edge : split->node->next_edges()) {
      if (holds(edge)) edge = Edge();
    }
    release_unused_operands(*split->node);
  }
  for (const auto& [node, hook] : release_hooks_) {
    node->del_post_hook(hook);
    node->release_variables();
    for (Edge& edge : node->next_edges()) edge = Edge();
  }
}

bool InputPath::leads_to_input(const Node* node) const {
  const auto found = leads_to_input_.find(node);
  return found != leads_to_input_.end() && found->second;
}

// Depth first, without recursion: graphs are as deep as models are.
void InputPath::explore(Node* root) {
  std::vector<std::pair<Node*, uint32_t>> open;  // each with its next edge
  const auto enter = [&](Node* node) {
    if (node != nullptr && leads_to_input_.emplace(node, false).second) open.emplace_back(node, 0);
  };
  enter(root);
  while (!open.empty()) {
    Node* const node = open.back().first;
    if (open.back().second < node->num_outputs()) {
      enter(node->next_edge(open.back().second++).function.get());
      continue;
    }
    open.pop_back();
    const auto& edges = node->next_edges();
    if (std::any_of(edges.begin(), edges.end(), [this](const Edge& edge) { return holds(edge); })) {
      leads_to_input_[node] = true;
      path_.push_back(node->getptr());
    }
  }
}

// The positions of its edges to nodes that lead to no input.
std::vector<size_t> InputPath::edges_off(const Node& node) const {
  std::vector<size_t> places;
  for (size_t i = 0; i < node.num_outputs(); ++i) {
    if (node.next_edge(i).is_valid() && !holds(node.next_edge(i))) places.push_back(i);
  }
  return places;
}

void InputPath::substitute(Node& node, const std::vector<size_t>& places) {
  Edges off;
  for (const size_t place : places) off.push_back(node.next_edge(place));
  const auto stand_in = make_node<Substitute>(node, std::move(off));
  // An operation that wrote into a view is a node inside the one of its base, and both have the same edges.
  auto* const of_base = dynamic_cast<torch::autograd::CopySlices*>(&node);
  for (size_t i = 0; i < places.size(); ++i) {
    handed_over_.emplace_back(stand_in, static_cast<uint32_t>(i));
    if (of_base != nullptr && of_base->fn->next_edge(places[i]) == node.next_edge(places[i])) {
      of_base->fn->next_edges()[places[i]] = handed_over_.back();
    }
    node.next_edges()[places[i]] = handed_over_.back();
  }
}

void InputPath::take_kept(Gradients gradients, Edges& starts, Gradients& kept) {
  const auto add = [&](const Edge& edge, at::Tensor& gradient) {
    if (!gradient.defined()) return;
    starts.push_back(edge);
    kept.push_back(std::move(gradient));
  };
  for (size_t i = 0; i < gradients.size(); ++i) add(handed_over_[i], gradients[i]);
  for (const auto& split : splits_) {
    for (size_t i = 0; i < split->gradients.size(); ++i) {
      add(Edge(split->node, static_cast<uint32_t>(i)), split->gradients[i]);
    }
  }
}

}  // namespace pacer::detail
