// How LibTorch holds the nodes of a graph: by std::shared_ptr up to 2.12, by c10::intrusive_ptr from 2.13 on.
// Whoever keeps or makes nodes says NodePtr and make_node, and need not know.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include <torch/csrc/autograd/function.h>

namespace pacer::detail {

using NodePtr = decltype(torch::autograd::Edge::function);

template <class N, class... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<N>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
  }
}

}  // namespace pacer::detail
