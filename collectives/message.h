// A message between two ranks, as one of those that a call starts together.
#pragma once

#include <ATen/core/Tensor.h>

namespace pacer {

// Made by send() or receive(). Messages from one rank to another arrive in the order in which they were sent.
struct Message {
  // A tensor for rank `to`.
  static Message send(const at::Tensor& tensor, int to) { return {tensor, to, true}; }
  // A tensor from rank `from`, written to `tensor`.
  static Message receive(const at::Tensor& tensor, int from) { return {tensor, from, false}; }

  at::Tensor tensor;  // contiguous; of the same size and dtype on both sides
  int peer = 0;
  bool is_sent = false;
};

}  // namespace pacer
