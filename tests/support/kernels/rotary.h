// Heads of queries, keys and values as tensors of one device, normalised, rotated and back, for the tests of their
// kernels.
#pragma once

#include <vector>

#include <pacer/kernels/rotary.h>

#include "support/kernels/fp8_reference.h"

namespace pacer::testing {

struct RotaryTypes {
  at::ScalarType heads, parameter;
};
// All that go together.
inline const std::vector<RotaryTypes> kRotaryTypes = {{at::kFloat, at::kFloat},
                                                      {at::kBFloat16, at::kFloat},
                                                      {at::kHalf, at::kFloat},
                                                      {at::kBFloat16, at::kBFloat16},
                                                      {at::kHalf, at::kHalf}};

struct RotaryShape {
  int64_t batch, sequence, heads, kv_heads, head_dim;

  int64_t rows() const { return batch * sequence; }
  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t width() const { return q_width() + 2 * kv_width(); }
};

// What goes in; angles and weights may be left undefined.
struct RotaryInput {
  RotaryShape shape;
  Tensor qkv, dq, dk, dv, cosines, sines, q_weight, k_weight;

  RotaryInput to(at::Device device) const {
    RotaryInput moved = *this;
    for (Tensor* tensor : {&moved.qkv, &moved.dq, &moved.dk, &moved.dv, &moved.cosines, &moved.sines,
                           &moved.q_weight, &moved.k_weight}) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
    return moved;
  }
};

inline RotaryInput random_rotary(const RotaryTypes& types, const RotaryShape& shape, bool is_rotated,
                                 bool has_norms) {
  const auto random = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return torch::randn(sizes).to(dtype);
  };
  RotaryInput in{shape, {}, {}, {}, {}, {}, {}, {}, {}};
  in.qkv = random({shape.rows(), shape.width()}, types.heads);
  in.dq = random({shape.rows(), shape.q_width()}, types.heads);
  in.dk = random({shape.rows(), shape.kv_width()}, types.heads);
  in.dv = random({shape.rows(), shape.kv_width()}, types.heads);
  if (is_rotated) {
    const Tensor angles = torch::rand({shape.sequence, shape.head_dim / 2}) * 6.3;
    in.cosines = angles.cos();
    in.sines = angles.sin();
  }
  if (has_norms) {
    in.q_weight = random({shape.head_dim}, types.parameter);
    in.k_weight = random({shape.head_dim}, types.parameter);
  }
  return in;
}

// q and k side by side; the gradient of qkv; gradients of weights.
struct RotaryOutput {
  Tensor qk, dqkv, dq_weight, dk_weight;

  std::vector<Tensor> all() const {
    std::vector<Tensor> defined;
    for (const Tensor& tensor : {qk, dqkv, dq_weight, dk_weight}) {
      if (tensor.defined()) defined.push_back(tensor);
    }
    return defined;
  }
};

inline const void* rotary_memory(const Tensor& matrix, int64_t column = 0) {
  return static_cast<const char*>(matrix.data_ptr()) + column * matrix.element_size();
}
inline void* writable_rotary_memory(const Tensor& matrix, int64_t column = 0) {
  return static_cast<char*>(matrix.data_ptr()) + column * matrix.element_size();
}

inline void describe_rotary(const RotaryInput& in, kernels::RotaryForward& work) {
  work.type = element_type_of(in.qkv.scalar_type());
  work.rows = in.shape.rows();
  work.sequence = in.shape.sequence;
  work.head_dim = in.shape.head_dim;
  work.q.heads = in.shape.heads;
  work.k.heads = in.shape.kv_heads;
  if (in.cosines.defined()) {
    work.cosines = in.cosines.const_data_ptr<float>();
    work.sines = in.sines.const_data_ptr<float>();
  }
  if (in.q_weight.defined()) {
    work.parameter_type = element_type_of(in.q_weight.scalar_type());
    work.q.weight = in.q_weight.const_data_ptr();
    work.k.weight = in.k_weight.const_data_ptr();
  }
}

// From columns of qkv to those of qk.
inline kernels::RotaryForward rotary_forward_of(const RotaryInput& in, const Tensor& qk) {
  kernels::RotaryForward work;
  describe_rotary(in, work);
  const int64_t q_width = in.shape.q_width();
  work.q.from = rotary_memory(in.qkv);
  work.k.from = rotary_memory(in.qkv, q_width);
  work.q.to = writable_rotary_memory(qk);
  work.k.to = writable_rotary_memory(qk, q_width);
  work.q.from_stride = work.k.from_stride = in.qkv.size(1);
  work.q.to_stride = work.k.to_stride = qk.size(1);
  return work;
}

inline kernels::RotaryBackward rotary_backward_of(const RotaryInput& in, const RotaryOutput& out,
                                                  const Tensor& partials) {
  kernels::RotaryBackward work;
  describe_rotary(in, work);
  const int64_t q_width = in.shape.q_width(), kv_width = in.shape.kv_width();
  work.v.heads = in.shape.kv_heads;
  work.q.from = rotary_memory(in.dq);
  work.k.from = rotary_memory(in.dk);
  work.v.from = rotary_memory(in.dv);
  work.q.from_stride = q_width;
  work.k.from_stride = work.v.from_stride = kv_width;
  work.q.to = writable_rotary_memory(out.dqkv);
  work.k.to = writable_rotary_memory(out.dqkv, q_width);
  work.v.to = writable_rotary_memory(out.dqkv, q_width + kv_width);
  work.q.to_stride = work.k.to_stride = work.v.to_stride = in.shape.width();
  if (!in.q_weight.defined()) return work;
  work.q_read = rotary_memory(in.qkv);
  work.k_read = rotary_memory(in.qkv, q_width);
  work.q_read_stride = work.k_read_stride = in.shape.width();
  work.partials = partials.mutable_data_ptr<float>();
  work.dq_weight = out.dq_weight.mutable_data_ptr<float>();
  work.dk_weight = out.dk_weight.mutable_data_ptr<float>();
  return work;
}

// On the CPU, rows and parts in two tasks.
inline void run_rotary(const kernels::RotaryForward& work) {
  kernels::rotary_cpu(work, work.rows / 2, work.rows);
  kernels::rotary_cpu(work, 0, work.rows / 2);
}
inline void run_rotary(const kernels::RotaryBackward& work) {
  const int64_t parts = kernels::rotary_parts(work.rows);
  kernels::rotary_backward_cpu(work, parts / 2, parts);
  kernels::rotary_backward_cpu(work, 0, parts / 2);
  if (work.dq_weight != nullptr) kernels::rotary_weights_cpu(work);
}

// Forward and backward by `run`, which gets the work of each, into memory filled with a number that no result leaves.
template <class Run>
RotaryOutput both_ways(const RotaryInput& in, const Run& run) {
  const RotaryShape& shape = in.shape;
  const auto floats = in.qkv.options().dtype(at::kFloat);
  RotaryOutput out;
  out.qk = at::full({shape.rows(), shape.q_width() + shape.kv_width()}, 77, in.qkv.options());
  out.dqkv = at::full({shape.rows(), shape.width()}, 77, in.qkv.options());
  Tensor partials;
  if (in.q_weight.defined()) {
    out.dq_weight = at::full({shape.head_dim}, 77, floats);
    out.dk_weight = at::full({shape.head_dim}, 77, floats);
    partials = at::full({2, kernels::rotary_parts(shape.rows()), shape.head_dim}, 77, floats);
  }
  run(rotary_forward_of(in, out.qk));
  run(rotary_backward_of(in, out, partials));
  return out;
}

}  // namespace pacer::testing
