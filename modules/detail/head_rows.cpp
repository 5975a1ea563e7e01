#include <pacer/modules/detail/head_rows.h>

#include <algorithm>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/device/detail/stream.h>
#include <pacer/kernels/rotary.h>
#include <pacer/modules/detail/column_sums.h>
#include <pacer/modules/detail/matrix.h>
#include <pacer/modules/detail/operator_list.h>

namespace pacer::detail {
namespace {

constexpr int64_t kHeadsOfTask = 64;  // that one thread of the CPU takes at least

// A copy only where rows do not begin where kernels need it.
at::Tensor readable_rows(const at::Tensor& x) {
  const bool begins_well = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  const bool are_rows = x.stride(1) == 1 && x.stride(0) % 8 == 0 && x.stride(0) >= x.size(1);
  return begins_well && are_rows ? x : readable(x);
}

// Of columns [first, first + width) of a matrix.
kernels::RotaryHeads heads_of(int64_t heads, const at::Tensor& from, const at::Tensor& to) {
  kernels::RotaryHeads result;
  result.heads = heads;
  result.from = from.const_data_ptr();
  result.from_stride = from.stride(0);
  result.to = to.mutable_data_ptr();
  result.to_stride = to.stride(0);
  return result;
}

// Parameters of both norms have 32 bits, or both those of the heads.
at::ScalarType parameter_type(const HeadRows& of, at::ScalarType type) {
  return of.q_weight.scalar_type() == type && of.k_weight.scalar_type() == type ? type : at::kFloat;
}

void describe(const HeadRows& of, const at::Tensor& like, kernels::RotaryForward& work) {
  work.type = element_type(like.scalar_type());
  work.rows = like.size(0);
  work.sequence = std::max<int64_t>(of.sequence, 1);
  work.head_dim = of.head_dim;
  work.epsilon = static_cast<float>(of.epsilon);
  if (!of.are_rotated()) return;
  work.cosines = of.cosines.const_data_ptr<float>();
  work.sines = of.sines.const_data_ptr<float>();
}

void run(const kernels::RotaryForward& work, at::Device device) {
  if (work.rows == 0) return;
  if (device.is_cuda()) return kernels::rotary_cuda(work, current_stream(device));
  const int64_t heads = std::max<int64_t>(work.q.heads + work.k.heads, 1);
  at::parallel_for(0, work.rows, std::max<int64_t>(kHeadsOfTask / heads, 1),
                   [&](int64_t begin, int64_t end) { kernels::rotary_cpu(work, begin, end); });
}

void run(const kernels::RotaryBackward& work, at::Device device) {
  if (device.is_cuda()) return kernels::rotary_backward_cuda(work, current_stream(device));
  const int64_t heads = work.q.heads + work.k.heads + work.v.heads;
  const int64_t of_part = std::max<int64_t>(kernels::rotary_part_rows(work.rows) * heads, 1);
  at::parallel_for(0, kernels::rotary_parts(work.rows), std::max<int64_t>(kHeadsOfTask / of_part, 1),
                   [&](int64_t begin, int64_t end) { kernels::rotary_backward_cpu(work, begin, end); });
  if (work.dq_weight != nullptr || work.dk_weight != nullptr) kernels::rotary_weights_cpu(work);
}

// The columns of queries, keys and values.
std::vector<at::Tensor> columns_of(const HeadRows& of, const at::Tensor& qkv) {
  const int64_t q = of.heads * of.head_dim, kv = of.kv_heads * of.head_dim;
  return {qkv.narrow(1, 0, q), qkv.narrow(1, q, kv), qkv.narrow(1, q + kv, kv)};
}

}  // namespace

std::vector<at::Tensor> split_heads(const HeadRows& of, const at::Tensor& qkv) {
  const at::AutoDispatchBelowADInplaceOrView no_views;
  const c10::DeviceGuard guard(qkv.device());
  std::vector<at::Tensor> parts = columns_of(of, qkv);
  if (!of.are_rotated() && !of.are_normalized()) return parts;
  kernels::RotaryForward work;
  describe(of, qkv, work);
  at::Tensor q = parts[0], k = parts[1], q_weight, k_weight;
  // Without a norm, backward reads nothing of what comes in, so that it may be written over, unless a region keeps it.
  if (of.are_normalized() || region_keeps_results()) {
    const int64_t width = q.size(1) + k.size(1);
    const at::Tensor made = at::empty({qkv.size(0), width}, qkv.options());
    q = made.narrow(1, 0, q.size(1));
    k = made.narrow(1, q.size(1), k.size(1));
  }
  if (of.are_normalized()) {
    const at::ScalarType type = parameter_type(of, qkv.scalar_type());
    q_weight = readable(of.q_weight.to(type));
    k_weight = readable(of.k_weight.to(type));
    work.parameter_type = element_type(type);
  }
  work.q = heads_of(of.heads, parts[0], q);
  work.k = heads_of(of.kv_heads, parts[1], k);
  if (of.are_normalized()) {
    work.q.weight = q_weight.const_data_ptr();
    work.k.weight = k_weight.const_data_ptr();
  }
  run(work, qkv.device());
  return {q, k, parts[2]};
}

HeadGradients join_heads(const HeadRows& of, std::vector<at::Tensor> gradients, const at::Tensor& qkv,
                         bool for_q_weight, bool for_k_weight) {
  const auto given = std::find_if(gradients.begin(), gradients.end(),
                                  [](const at::Tensor& gradient) { return gradient.defined(); });
  const at::TensorOptions options = given->options();
  const int64_t rows = given->size(0);
  const c10::DeviceGuard guard(options.device());
  for (size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& gradient = gradients[i];
    const int64_t width = (i == 0 ? of.heads : of.kv_heads) * of.head_dim;
    gradient = gradient.defined() ? readable_rows(gradient) : at::zeros({rows, width}, options);
  }
  if (!of.are_rotated() && !of.are_normalized()) return {at::cat(gradients, 1), {}, {}};
  HeadGradients made;
  made.qkv = at::empty({rows, of.width()}, options);
  const std::vector<at::Tensor> to = columns_of(of, made.qkv);
  kernels::RotaryBackward work;
  describe(of, made.qkv, work);
  work.q = heads_of(of.heads, gradients[0], to[0]);
  work.k = heads_of(of.kv_heads, gradients[1], to[1]);
  work.v = heads_of(of.kv_heads, gradients[2], to[2]);
  at::Tensor read, q_weight, k_weight, partials;
  if (of.are_normalized()) {
    const at::ScalarType type = parameter_type(of, made.qkv.scalar_type());
    q_weight = readable(of.q_weight.to(type));
    k_weight = readable(of.k_weight.to(type));
    work.parameter_type = element_type(type);
    work.q.weight = q_weight.const_data_ptr();
    work.k.weight = k_weight.const_data_ptr();
    read = readable_rows(qkv);
    const std::vector<at::Tensor> parts = columns_of(of, read);
    work.q_read = parts[0].const_data_ptr();
    work.k_read = parts[1].const_data_ptr();
    work.q_read_stride = work.k_read_stride = read.stride(0);
    if (for_q_weight || for_k_weight) {
      partials = at::empty({2, kernels::rotary_parts(rows), of.head_dim}, options.dtype(at::kFloat));
      work.partials = partials.mutable_data_ptr<float>();
    }
    if (for_q_weight) made.q_weight = column_memory(rows, of.head_dim, options.device());
    if (for_k_weight) made.k_weight = column_memory(rows, of.head_dim, options.device());
  }
  if (rows == 0) return made;
  if (for_q_weight) work.dq_weight = made.q_weight.mutable_data_ptr<float>();
  if (for_k_weight) work.dk_weight = made.k_weight.mutable_data_ptr<float>();
  run(work, options.device());
  return made;
}

at::Tensor turned(const at::Tensor& heads, int64_t head_dim, const at::Tensor& cosines,
                  const at::Tensor& sines, bool back) {
  const c10::DeviceGuard guard(heads.device());
  const at::Tensor from = readable_rows(heads);
  at::Tensor to = at::empty({heads.size(0), heads.size(1)}, heads.options());
  const int64_t number = heads.size(1) / head_dim;
  const HeadRows of{number, 0, head_dim, cosines.size(0), cosines, sines, {}, {}};
  if (back) {
    kernels::RotaryBackward work;
    describe(of, to, work);
    work.q = heads_of(number, from, to);
    if (work.rows > 0) run(work, heads.device());
  } else {
    kernels::RotaryForward work;
    describe(of, to, work);
    work.q = heads_of(number, from, to);
    run(work, heads.device());
  }
  return to;
}

}  // namespace pacer::detail
