// The backward pass in two halves, for pipelines without bubbles (Qi et al., arXiv:2401.10241): the first
// gives the gradients of a stage's inputs, which the stage before waits for, the second those of its
// parameters, which nobody waits for.
//
//   auto y = stage->forward(x);                       // x: a leaf that requires a gradient
//   pacer::SplitBackward backward({y}, {x});
//   auto dx = backward.input_half({dy})[0];           // send it; parameters have no gradients yet
//   ...                                               // passes of other micro-batches
//   backward.weight_half();                           // gradients are added to .grad(), hooks run
//
// The halves give what one backward pass gives, to the bit, and compute nothing twice. Parameters are those
// leaves that the graph reaches and that are no inputs. A matrix product or convolution of LibTorch on the
// way to an input waits with its weight's gradient for the second half; until then it keeps its operand and
// the gradient of its result. So does everything that does not lead to an input. All other operations on the
// way, a torch::autograd::Function (recompute, layers that are fused or multiply in 8 bits) and attention
// among them, compute all of their gradients in the first half, which are handed to their parameters in the
// second. Memory of all else is given back while the first half runs.
//
// The graph is used up, as it is by backward(): a hook on a tensor inside it runs in the first half, one on a
// parameter in the second, once. An exception in a half ends both, with some gradients added or none. There
// are no second derivatives. As with backward(), the gradient of a parameter that is only added or reshaped
// may share its memory with one that was given or returned: do not change those in place.
#pragma once

#include <cstdint>
#include <vector>

#include <torch/csrc/autograd/function.h>  // edge.h alone does not compile since LibTorch 2.13
#include <torch/csrc/autograd/function_hook.h>

#include <pacer/modules/tensor_call.h>

namespace pacer {

class SplitBackward {
 public:
  // `outputs`: what a stage gave; undefined ones and those that need no gradient may be among them. `inputs`:
  // what it was given, likewise; without any, the second half does everything. No tensor is kept, so that
  // both may be freed; their graph is. Throws InvalidArgument for an input that is no leaf.
  SplitBackward(const Tensors& outputs, const Tensors& inputs);
  SplitBackward(SplitBackward&&) = default;
  SplitBackward& operator=(SplitBackward&&) = default;

  // Returns the gradient of each input, undefined where none arrives. `gradients`: one for each output;
  // undefined: none. Throws InvalidArgument, and changes nothing, where they do not fit the outputs, and
  // where it ran before.
  Tensors input_half(const Tensors& gradients);
  // Throws InvalidArgument unless input_half was the last call and returned.
  void weight_half();

 private:
  using Edges = std::vector<torch::autograd::Edge>;
  struct Output {
    torch::autograd::Edge edge;  // without a function: needs no gradient
    std::vector<int64_t> sizes;
  };
  enum class Next { input_half, weight_half, nothing };

  void check(const Tensors& gradients) const;

  Next next_ = Next::input_half;
  std::vector<Output> outputs_;
  Edges inputs_;
  // Where the weight half begins, and the gradients there.
  Edges starts_;
  Tensors kept_;
};

}  // namespace pacer
