#include <pacer/modules/nf4_weight.h>

#include <algorithm>
#include <ostream>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/nf4.h>
#include <pacer/modules/detail/matrix.h>

namespace pacer::modules {
namespace {

// The buffers as kernels take them.
kernels::Nf4Codes codes_of(const Nf4WeightImpl& weight) {
  kernels::Nf4Codes codes;
  codes.count = weight.out_features * weight.in_features;
  codes.codes = weight.codes.mutable_data_ptr<uint8_t>();
  if (!weight.double_quantization) {
    codes.absmax = weight.absmax.mutable_data_ptr<float>();
    return codes;
  }
  codes.absmax_codes = weight.absmax.mutable_data_ptr<uint8_t>();
  codes.nested_absmax = weight.nested_absmax.mutable_data_ptr<float>();
  codes.nested_map = weight.nested_quant_map.const_data_ptr<float>();
  codes.offset = weight.nested_offset.mutable_data_ptr<float>();
  return codes;
}

constexpr int64_t kGrain = 1024;  // blocks that one thread of the CPU takes at least

bool can_be_kept(at::ScalarType dtype) { return detail::is_castable(dtype) || dtype == at::kDouble; }

}  // namespace

Nf4WeightImpl::Nf4WeightImpl(int64_t out, int64_t in, at::ScalarType weight_dtype, bool doubly)
    : out_features(out), in_features(in), dtype(weight_dtype), double_quantization(doubly) {
  require(out >= 0 && in >= 0, "a weight in 4 bits of ", out, " x ", in, " elements cannot be");
  require(can_be_kept(dtype), "a weight in 4 bits cannot stand for one of ", dtype,
          ", only for Float, BFloat16, Half and Double");
  Nf4WeightImpl::reset();
}

Nf4WeightImpl::Nf4WeightImpl(const at::Tensor& weight, bool doubly)
    : Nf4WeightImpl(weight.size(0), weight.size(1), weight.scalar_type(), doubly) {
  const at::NoGradGuard no_grad;
  require(at::isfinite(weight).all().item<bool>(),
          "a weight that is to be put in 4 bits has elements that are not finite");
  Cloneable::to(weight.device(), /*non_blocking=*/false);
  if (weight.numel() == 0) return;
  const c10::DeviceGuard guard(weight.device());
  const at::Tensor x = detail::readable(dtype == at::kDouble ? weight.to(at::kFloat) : weight.detach());
  const at::Tensor scratch = at::empty(absmax.sizes(), x.options().dtype(at::kFloat));
  const kernels::Nf4Codes to = codes_of(*this);
  const kernels::ElementType type = detail::element_type(x.scalar_type());
  float* scales = scratch.mutable_data_ptr<float>();
  if (x.device().is_cuda()) {
    kernels::nf4_quantize_cuda(x.const_data_ptr(), type, to, scales, detail::current_stream(x.device()));
    return;
  }
  at::parallel_for(0, kernels::nf4_blocks(to.count), kGrain, [&](int64_t begin, int64_t end) {
    kernels::nf4_quantize_cpu(x.const_data_ptr(), type, to, scales, begin, end);
  });
  if (!double_quantization) return;
  kernels::nf4_offset_cpu(scales, to);
  kernels::nf4_quantize_scales_cpu(scales, to, 0, kernels::nf4_nested_blocks(to.count));
}

void Nf4WeightImpl::reset() {
  const int64_t count = out_features * in_features;
  const int64_t blocks = kernels::nf4_blocks(count);
  const auto zeros = [](at::IntArrayRef sizes, at::ScalarType type) { return at::zeros(sizes, type); };
  codes = register_buffer("codes", zeros({kernels::nf4_bytes(count), 1}, at::kByte));
  absmax = register_buffer("absmax", zeros({blocks}, double_quantization ? at::kByte : at::kFloat));
  if (!double_quantization) return;
  nested_absmax = register_buffer("nested_absmax", zeros({kernels::nf4_nested_blocks(count)}, at::kFloat));
  nested_quant_map = register_buffer("nested_quant_map", at::empty({256}, at::kFloat));
  std::copy_n(kernels::nf4_nested_map().data(), 256, nested_quant_map.mutable_data_ptr<float>());
  nested_offset = register_buffer("nested_offset", zeros({}, at::kFloat));
}

void Nf4WeightImpl::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::Nf4Weight(out_features=" << out_features << ", in_features=" << in_features
         << ", double_quantization=" << std::boolalpha << double_quantization << ")";
}

void Nf4WeightImpl::to(at::Device device, at::ScalarType to_dtype, bool non_blocking) {
  to(to_dtype, non_blocking);
  to(device, non_blocking);
}
void Nf4WeightImpl::to(at::ScalarType to_dtype, bool /*non_blocking*/) {
  if (can_be_kept(to_dtype)) dtype = to_dtype;
}
void Nf4WeightImpl::to(at::Device device, bool non_blocking) { Cloneable::to(device, non_blocking); }

at::Tensor Nf4WeightImpl::decode(at::ScalarType to_dtype) const {
  require(can_be_kept(to_dtype), "a weight in 4 bits is decoded to Float, BFloat16, Half or Double, not to ",
          to_dtype);
  if (to_dtype == at::kDouble) return decode(at::kFloat).to(at::kDouble);
  const c10::DeviceGuard guard(codes.device());
  const at::Tensor out = at::empty({out_features, in_features}, codes.options().dtype(to_dtype));
  if (out.numel() == 0) return out;
  const kernels::Nf4Codes from = codes_of(*this);
  const kernels::ElementType type = detail::element_type(to_dtype);
  void* memory = out.mutable_data_ptr();
  if (out.device().is_cuda()) {
    kernels::nf4_decode_cuda(from, type, memory, in_features, in_features,
                             detail::current_stream(out.device()));
  } else {
    at::parallel_for(0, kernels::nf4_blocks(from.count), kGrain, [&](int64_t begin, int64_t end) {
      kernels::nf4_decode_cpu(from, type, memory, in_features, in_features, begin, end);
    });
  }
  return out;
}

int64_t Nf4WeightImpl::bytes() const {
  int64_t sum = 0;
  for (const at::Tensor& buffer : buffers()) sum += static_cast<int64_t>(buffer.nbytes());
  return sum;
}

}  // namespace pacer::modules
