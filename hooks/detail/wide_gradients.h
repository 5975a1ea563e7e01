// Gradients of bf16 and fp16 parameters that add up in fp32 over the micro-batches of a window: in their own
// dtype a sum stops growing once it is 256 times (fp16: 2,048 times) what is added. A gradient is made fp32
// as it comes from the first pass, and autograd then adds to it in fp32. The last one is rounded to the
// parameter's dtype, once, before anybody else sees it: what travels, and what optimizers get, is as ever.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

class WideGradients {
 public:
  WideGradients();
  WideGradients(const WideGradients&) = delete;
  ~WideGradients();

  // The parameters that it is about, all of them, from now on: it lets go of those that it had before. Those
  // of other dtypes, and frozen ones, are passed over. It has to see a gradient before buckets do: call it
  // before they are made.
  void watch(const std::vector<at::Tensor>& parameters);

  // A backward pass is under way: one that others follow, or the last of several.
  void begin_pass();
  void begin_last_pass();
  // It has ended, or failed.
  void end_pass();

  // Rounds what is fp32 yet: the last pass has not reached it, or there was none.
  void round_the_rest();

  // Makes the gradients that these parameters have fp32, where it would be.
  static void widen(const std::vector<at::Tensor>& parameters);

 private:
  struct State;
  std::shared_ptr<State> state_;                            // shared with the parameters' hooks
  std::unordered_map<const void*, at::Tensor> parameters_;  // that have hooks, by TensorImpl
};

}  // namespace pacer::detail
