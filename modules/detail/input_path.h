// The part of a graph that leads from a stage's outputs to its inputs, for a backward pass that runs it first
// and all else, which leads to parameters, later (split_backward.h).
//
// Both parts meet in nodes of the path that have an edge off it. Such a node either *splits*, where each of
// its gradients is a computation of its own: it runs in both halves, in each for the edges of that half. Or
// it runs in the first half only, for all of its edges, and a node of ours takes its place in the second.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include <pacer/modules/detail/autograd_node.h>

namespace pacer::detail {

class InputPath {
 public:
  using Edge = torch::autograd::Edge;
  using Edges = torch::autograd::edge_list;
  using Gradients = torch::autograd::variable_list;

  // Finds the path, puts hooks on its nodes and turns edges off it to nodes of ours. Edges without a function
  // are allowed and lead nowhere.
  InputPath(const Edges& outputs, const Edges& inputs);
  InputPath(const InputPath&) = delete;
  // Takes the path apart: it leads nowhere any more, and keeps neither hooks nor tensors, but for what nodes
  // that split need in the second half.
  ~InputPath();

  bool holds(const Edge& edge) const { return leads_to_input(edge.function.get()); }
  // What the first half must ask for besides the gradients of the inputs.
  const Edges& handed_over() const { return handed_over_; }
  // After the first half, which found `gradients` at handed_over(): adds the edges where the second one
  // begins, and the gradients that it begins with.
  void take_kept(Gradients gradients, Edges& starts, Gradients& kept);

 private:
  using Node = torch::autograd::Node;
  // A node that splits, and the gradients of its results that arrive in the first half.
  struct Split {
    NodePtr node;
    Gradients gradients;
  };
  struct KeepGradients;
  struct ReleaseVariables;
  struct Substitute;

  bool leads_to_input(const Node* node) const;
  void explore(Node* root);
  std::vector<size_t> edges_off(const Node& node) const;
  void substitute(Node& node, const std::vector<size_t>& places);

  std::unordered_map<const Node*, bool> leads_to_input_;  // of all nodes that were seen
  std::vector<NodePtr> path_;
  std::vector<std::unique_ptr<Split>> splits_;  // their addresses are known to hooks
  std::unordered_map<Node*, uintptr_t> release_hooks_;
  Edges handed_over_;
};

}  // namespace pacer::detail
