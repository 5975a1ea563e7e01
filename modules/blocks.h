// A stack of blocks that hooks act around: a torch::nn::ModuleList, with the same parameter names, whose
// blocks are called through run(). A Session's hooks may then leave a block out (LayerDrop), run it again in
// backward instead of keeping its activations (Recompute), or keep its parameters on other ranks while it
// does not run (Shards), whatever the order in which they were given to it.
//
//   struct GptImpl : torch::nn::Module {
//     GptImpl() {
//       register_module("blocks", blocks);
//       for (int i = 0; i < 12; ++i) blocks->push_back(Block(768));
//     }
//     torch::Tensor forward(torch::Tensor x) {
//       for (size_t i = 0; i < blocks->size(); ++i) x = blocks->run(i, &BlockImpl::forward, x);
//       return x;
//     }
//     pacer::Blocks blocks;
//   };
//   session.use(pacer::Recompute(model->blocks)).use(pacer::LayerDrop(model->blocks));
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <pacer/core/error.h>
#include <pacer/modules/tensor_call.h>

namespace pacer {

// A block that is about to run.
struct BlockCall {
  size_t index;
  const std::shared_ptr<torch::nn::Module>& block;
  size_t results;  // tensors that it returns; 0 where only the call itself tells
};

// What a hook does around blocks. It outlives neither the Blocks nor the graphs that it is in: both hold it.
class BlockWrapper {
 public:
  virtual ~BlockWrapper() = default;
  // What the block gives for `x`; `rest` is the block with all that is nearer to it. Called in forward, with
  // or without gradients, and, where a wrapper further out recomputes, in backward.
  virtual Tensors run(const BlockCall& call, const TensorFunction& rest, const Tensors& x) = 0;
};

// From the outside in: a dropped block is neither recomputed nor gathered, and parameters of a recomputed one
// come again.
enum class WrapperLevel { drop, recompute, gather };

class BlocksImpl : public torch::nn::ModuleListImpl {
 public:
  using ModuleListImpl::ModuleListImpl;

  // Block `i` (from 0) on these arguments. `f` is a member function of the block's class, called on the
  // block, or any function of the arguments; tensor_call.h says what arguments and results there may be. It
  // may run again in backward, so it must own what it captures: capture the loop's index by value, never by
  // reference. All tensors that need a gradient are arguments, unless they are parameters of the block.
  template <class F, class... Args>
  auto run(size_t i, F f, Args... args) {
    if constexpr (std::is_member_function_pointer_v<F>) {
      const auto call = [f, block = member_block(i, f)](auto&&... values) {
        return std::invoke(f, *block, std::forward<decltype(values)>(values)...);
      };
      return run(i, call, std::move(args)...);
    } else {
      using Call = detail::TensorCall<F, Args...>;
      check_index(i);
      if (!is_wrapped()) return static_cast<typename Call::Result>(std::invoke(f, std::move(args)...));
      Call call(std::move(f), std::move(args)...);
      return Call::Packed::unpack(
          run_wrapped(i, Call::Packed::kCount, std::move(call.function), call.tensors));
    }
  }

  // For hooks: one wrapper a level. wrap throws InvalidArgument where there is one already.
  void wrap(WrapperLevel level, std::shared_ptr<BlockWrapper> wrapper);
  void unwrap(WrapperLevel level) noexcept { wrapper(level) = nullptr; }

  // Wrappers stay with the original.
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& device = std::nullopt) const override;
  void pretty_print(std::ostream& stream) const override;

 private:
  template <class Result, class Block, class... Args>
  std::shared_ptr<Block> member_block(size_t i, Result (Block::*)(Args...)) const {
    return block_as<Block>(i);
  }
  template <class Result, class Block, class... Args>
  std::shared_ptr<Block> member_block(size_t i, Result (Block::*)(Args...) const) const {
    return block_as<Block>(i);
  }
  template <class Block>
  std::shared_ptr<Block> block_as(size_t i) const {
    check_index(i);
    auto block = std::dynamic_pointer_cast<Block>(ptr(i));
    require(block != nullptr, "block ", i, " is a ", ptr(i)->name(),
            ", but Blocks::run was given a function of ", c10::demangle(typeid(Block).name()));
    return block;
  }
  void check_index(size_t i) const;
  bool is_wrapped() const;
  Tensors run_wrapped(size_t i, size_t results, TensorFunction block, const Tensors& x);
  std::shared_ptr<BlockWrapper>& wrapper(WrapperLevel level) { return wrappers_[static_cast<size_t>(level)]; }

  std::array<std::shared_ptr<BlockWrapper>, 3> wrappers_;  // by level
};

TORCH_MODULE(Blocks);

}  // namespace pacer
