// Progressive layer dropping (Zhang & He, arXiv:2010.13369): a block of a residual stack runs with a
// probability that falls over training and with depth, and is the identity otherwise. Training gets cheaper;
// the expected output stays that of the whole stack. With per_sample it is stochastic depth by row (Huang et
// al., arXiv:1603.09382), the drop path of vision models: every block runs, and each row of its input, which
// is an index of the first dimension, keeps or drops what the block adds.
//
//   struct GptImpl : torch::nn::Module {
//     GptImpl(...) {
//       register_module("layer_drop", layer_drop);
//       for (auto& block : blocks) layer_drop->add(*block);
//     }
//     torch::Tensor forward(torch::Tensor x) {
//       for (size_t i = 0; i < blocks.size(); ++i)
//         x = layer_drop->gate(i, x, [&](torch::Tensor h) { return blocks[i]->forward(h); });
//       return x;
//     }
//   };
//   session.use(model->layer_drop);
//
// LayerDrop is a shared handle: model and Session use the same one. It has no parameters and no buffers and
// changes no parameter's name. In eval() every block runs, unscaled. Blocks must keep the shape of their
// input.
//
// A model whose stack is a pacer::Blocks needs no gates of its own:
//
//   session.use(pacer::LayerDrop(model->blocks));
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <pacer/hooks/progress.h>
#include <pacer/modules/blocks.h>
#include <pacer/modules/replayed.h>
#include <pacer/schedulers/layer_drop_rule.h>

namespace pacer {

class Hook;

namespace detail {
class LayerDropHook;
}

class LayerDropImpl : public torch::nn::Module {
 public:
  // Both throw InvalidArgument for options out of range.
  explicit LayerDropImpl(LayerDropOptions options = {});
  // Every block is a layer, and a Session that uses this handle puts the gates before them.
  explicit LayerDropImpl(Blocks blocks, LayerDropOptions options = {});

  // Adds the next layer of the stack and returns its index. Its parameters get a gradient of exactly zero
  // from a Session in a window in which it was always dropped, and so was each other layer that has them.
  int64_t add(const torch::nn::Module& block);
  // Adds a layer that counts as one without parameters, and returns its index.
  int64_t add();
  // Takes the parameters that layers have now, where they got or lost some since add(), as add_lora() and
  // quantize() do. A Session does it before its first step. A layer must be held by a shared_ptr.
  void refresh_parameters();

  // x + (block(x) - x) / p if layer `i` (0 <= i < number of layers) is kept in this micro-step, x if it is
  // dropped, block(x) where p is 1 or in eval(). With per_sample the block runs, and this holds for each row;
  // the result has x's dtype, and nothing waits for a GPU. The draw is the same each time the micro-step asks,
  // so a block that is recomputed in backward sees its own decision again.
  template <class Block>
  at::Tensor gate(int64_t i, const at::Tensor& x, Block&& block) const {
    const Decision decision = decide(i);
    if (!decision.keep) return x;
    return mixed(decision, x, std::forward<Block>(block)(x));
  }

  // The same for a block with several tensors: result k is gated with argument k. With per_sample the same
  // rows of all of them are dropped, of integers, too. `results`: how many there are; 0 for as many as there
  // are arguments.
  Tensors gate_tensors(int64_t i, size_t results, const Tensors& x, const TensorFunction& block) const;

  // Whether layer `i` runs in this micro-step; true in eval() and with per_sample.
  bool keeps(int64_t i) const { return decide(i).keep; }

  int64_t layers() const { return static_cast<int64_t>(parameters_of_.size()); }
  const LayerDropOptions& options() const { return options_; }

  // The micro-step that gates decide for. A Session does this; a loop without one calls it before forward.
  // A region that is recomputed in backward (pacer/modules/recompute.h) sees the one of its forward.
  void set_progress(const Progress& progress) { progress_ = progress; }
  // With per_sample: the rank whose rows these gates see, so that ranks draw apart. A Session sets it to the
  // rank among those that have the same layers; a loop without one on several ranks calls it once.
  void set_rank(int64_t rank) { rank_ = rank; }

  // Parameters all of whose layers are dropped in all micro-steps from window.micro_step to the window's end;
  // none with per_sample.
  std::vector<at::Tensor> dropped_parameters(const Progress& window) const;
  // Layers kept in the window, as a mean over its micro-steps. With per_sample it is how many a row is
  // expected to keep, which is the same on all ranks.
  double kept_layers(const Progress& window) const;

  // The blocks that it was made for; empty where gates are the model's.
  const Blocks& blocks() const { return blocks_; }
  // Whether gates may close: not in eval(), that of the blocks where it was made for some.
  bool is_active() const { return blocks_.is_empty() ? is_training() : blocks_->is_training(); }
  // Whether a Session has this handle.
  bool is_in_use() const { return in_use_; }

 private:
  friend class detail::LayerDropHook;  // sets in_use_, and reads decisions_
  struct Decision {
    bool keep;
    double probability;
    int64_t layer = 0;
    Progress progress = {};
  };
  Decision decide(int64_t i) const;
  void count_users();
  at::Tensor mixed(const Decision& decision, const at::Tensor& x, const at::Tensor& y) const;
  at::Tensor mixed_rows(const Decision& decision, const at::Tensor& x, const at::Tensor& y) const;
  at::Tensor kept_rows(const Decision& decision, const at::Tensor& x, at::ScalarType dtype) const;

  LayerDropOptions options_;
  Blocks blocks_ = nullptr;
  Progress progress_;
  int64_t rank_ = 0;
  bool in_use_ = false;
  mutable int64_t decisions_ = 0;                               // how often gates were asked in training
  std::vector<std::weak_ptr<const torch::nn::Module>> layers_;  // none where nobody shares it
  std::vector<std::vector<at::Tensor>> parameters_of_;          // by layer
  std::unordered_map<const void*, int64_t> users_;              // layers, by TensorImpl
};

// A shared handle, as TORCH_MODULE makes it, with the hook that a Session uses for it.
class LayerDrop : public torch::nn::ModuleHolder<LayerDropImpl> {
 public:
  using torch::nn::ModuleHolder<LayerDropImpl>::ModuleHolder;
  using Impl [[maybe_unused]] = LayerDropImpl;

  // Returns a new hook that acts on these gates.
  std::shared_ptr<Hook> hook() const;
};

}  // namespace pacer
