#include <pacer/optimizers/detail/moment_codes.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/tile.h>
#include <pacer/kernels/adam_8bit.h>

namespace pacer::detail {
namespace {

kernels::Moment moment_of(const StateField& field) {
  return field.kind == StateKind::moment ? kernels::Moment::first : kernels::Moment::second;
}

// The elements as they lie in memory, which has no gaps.
at::Tensor flat(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

}  // namespace

at::Tensor decoded(const StateField& field, const at::Tensor& codes, const at::Tensor& scales) {
  const at::Tensor on_host = flat(codes).cpu(), scales_on_host = scales.cpu().contiguous();
  const at::Tensor values = at::empty({codes.numel()}, at::kFloat);
  kernels::decode_moments_cpu(moment_of(field), on_host.const_data_ptr(),
                              static_cast<const uint16_t*>(scales_on_host.const_data_ptr()), codes.numel(),
                              values.mutable_data_ptr<float>());
  return values.to(codes.device()).as_strided(codes.sizes(), codes.strides(), 0);
}

void encode_field(ParameterEntry& entry, const StateField& field, StateMemory& memory) {
  const at::Tensor& like = entry.memory;
  at::Tensor& tensor = (entry.state->*field.get)();
  const at::Tensor values = at::empty_strided(like.sizes(), like.strides(), at::kFloat);
  values.copy_(tensor);
  const int64_t count = values.numel();
  const at::Tensor on_host = at::empty({count}, *dtype_of(entry, field));
  const at::Tensor scales = at::empty({scales_of(count)}, at::kHalf);
  kernels::encode_moments_cpu(moment_of(field), values.const_data_ptr<float>(), count,
                              on_host.mutable_data_ptr(), static_cast<uint16_t*>(scales.mutable_data_ptr()));
  const at::Tensor codes = memory.make({&entry}, field, on_host.scalar_type()).front();
  flat(codes).copy_(on_host);
  const at::Tensor on_device = scales.to(like.device());
  tensor = codes;
  (entry.state->*scale_field(field.kind).get)() = on_device;
}

void decode_unfit(std::vector<ParameterEntry>& entries, const StateMemory& memory) {
  for (ParameterEntry& entry : entries) {
    for (const StateField& field : kStateFields) {
      if (!is_coded(field.kind)) continue;
      at::Tensor& tensor = (entry.state->*field.get)();
      at::Tensor& scales = (entry.state->*scale_field(field.kind).get)();
      const bool is_fit = entry.state_bits == 8 && are_codes(tensor) && memory.may_stay(entry, tensor) &&
                          same_layout(tensor, entry.memory);
      if (is_fit) continue;
      // Codes without scales are zeros, which a failure left behind.
      if (are_codes(tensor)) tensor = scales.defined() ? decoded(field, tensor, scales) : at::Tensor();
      scales = at::Tensor();
    }
  }
}

void prepare_scales(std::vector<ParameterEntry>& entries) {
  constexpr int64_t kAlignment = 64;  // elements
  for (const StateField& field : kStateFields) {
    if (!is_scale(field.kind)) continue;
    std::vector<ParameterEntry*> missing;
    int64_t elements = 0;
    for (ParameterEntry& entry : entries) {
      at::Tensor& scales = (entry.state->*field.get)();
      if (!dtype_of(entry, field)) continue;
      if (scales.defined()) {
        scales = scales.to(entry.parameter.device()).contiguous();
      } else {
        missing.push_back(&entry);
        elements += round_up(scales_of(entry.range.count), kAlignment);
      }
    }
    if (missing.empty()) continue;
    const at::Tensor arena = at::zeros(
        {elements}, at::TensorOptions().dtype(at::kHalf).device(missing.front()->parameter.device()));
    int64_t offset = 0;
    for (ParameterEntry* entry : missing) {
      const int64_t count = scales_of(entry->range.count);
      (entry->state->*field.get)() = arena.as_strided({count}, {1}, offset);
      offset += round_up(count, kAlignment);
    }
  }
}

void cut_codes(FusedAdamStateFields& state, const StateField& field, const ParameterRange& range) {
  at::Tensor& codes = (state.*field.get)();
  at::Tensor& scales = (state.*scale_field(field.kind).get)();
  const at::Tensor values = range.first % kernels::kMomentGroup == 0 && codes.is_contiguous()
                                ? codes
                                : decoded(field, codes, scales);
  const at::Tensor part = values.reshape({-1}).narrow(0, range.first, range.count).clone();
  if (are_codes(values)) {
    scales = scales.narrow(0, range.first / kernels::kMomentGroup, scales_of(range.count)).clone();
  } else {
    scales = at::Tensor();
  }
  codes = part;
}

}  // namespace pacer::detail
