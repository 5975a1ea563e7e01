#include <pacer/optimizers/detail/adam_entry.h>

#include <array>
#include <map>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>

namespace pacer::detail {
namespace {

using kernels::AdamStorage;

constexpr int64_t kArenaAlignment = 128;  // elements

using Getter = at::Tensor& (FusedAdamStateFields::*)();

bool has_master(AdamStorage storage) {
  return storage == AdamStorage::bf16_master || storage == AdamStorage::f16_master;
}

std::array<const at::Tensor*, 6> tensors_of(const FusedAdamStateFields& s) {
  return {&s.exp_avg(), &s.exp_avg_sq(), &s.max_exp_avg_sq(),
          &s.master(),  &s.remainder(),  &s.trust_average()};
}

const void* data_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }

at::Tensor empty_in_layout_of(const at::Tensor& memory, at::ScalarType dtype) {
  return at::empty_strided(memory.sizes(), memory.strides(), memory.options().dtype(dtype));
}

// The bits of the fp32 value whose rounded half and remainder are given, and back.
at::Tensor join(const at::Tensor& rounded, const at::Tensor& remainder) {
  const at::Tensor high = rounded.view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  return high.add(remainder.to(at::kInt)).view(at::kFloat);
}

// One arena per dtype for all entries that lack the field; each gets a view in its own layout.
void create_missing(std::vector<AdamEntry*>& entries, Getter field, at::ScalarType dtype) {
  if (entries.empty()) return;
  int64_t elements = 0;
  for (const AdamEntry* entry : entries) elements += round_up(entry->parameter.numel(), kArenaAlignment);
  const at::Tensor arena =
      at::zeros({elements}, entries.front()->parameter.options().dtype(dtype).requires_grad(false));
  int64_t offset = 0;
  for (AdamEntry* entry : entries) {
    const at::Tensor& memory = entry->memory();
    (entry->state->*field)() = arena.as_strided(memory.sizes(), memory.strides(), offset);
    offset += round_up(memory.numel(), kArenaAlignment);
  }
}

void convert_to_layout(at::Tensor& tensor, const at::Tensor& memory, at::ScalarType dtype) {
  if (tensor.scalar_type() == dtype && tensor.device() == memory.device() && same_layout(tensor, memory))
    return;
  at::Tensor converted = empty_in_layout_of(memory, dtype);
  converted.copy_(tensor);
  tensor = converted;
}

// Creates the field where missing (zeros), converts it where it does not fit. Returns the entries it created.
template <class Needs, class DtypeOf>
std::vector<AdamEntry*> prepare_field(std::vector<AdamEntry>& entries, Getter field, Needs needs,
                                      DtypeOf dtype_of) {
  std::map<at::ScalarType, std::vector<AdamEntry*>> missing;
  std::vector<AdamEntry*> created;
  for (AdamEntry& entry : entries) {
    if (!needs(entry)) continue;
    at::Tensor& tensor = (entry.state->*field)();
    if (tensor.defined()) {
      convert_to_layout(tensor, entry.memory(), dtype_of(entry));
    } else {
      missing[dtype_of(entry)].push_back(&entry);
      created.push_back(&entry);
    }
  }
  for (auto& [dtype, group] : missing) create_missing(group, field, dtype);
  return created;
}

// The new remainder keeps the fp32 value of a former master copy exactly.
void remainder_from_master(AdamEntry& entry) {
  const at::Tensor master = entry.state->master().to(entry.parameter.device()).to(at::kFloat).contiguous();
  const at::Tensor bits = master.view(at::kInt);
  const at::Tensor rounded = bits.add(0x8000).bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
  entry.state->remainder().copy_(bits.bitwise_and(0xFFFF).masked_fill(master.isnan(), 0));
  entry.parameter.copy_(at::where(master.isnan(), master.to(at::kBFloat16), rounded));
}

// Two zeros where they are missing, on the parameter's device.
void prepare_trust_average(AdamEntry& entry) {
  if (!entry.averages_trust) return;
  at::Tensor& average = entry.state->trust_average();
  const auto options = at::TensorOptions().dtype(at::kDouble).device(entry.parameter.device());
  average = average.defined() ? average.to(options).contiguous() : at::zeros({2}, options);
}

}  // namespace

bool AdamEntry::is_current() const {
  const auto now = tensors_of(*state);
  for (size_t i = 0; i < now.size(); ++i) {
    if (!now[i]->is_same(state_tensors[i]) || data_of(*now[i]) != state_data[i]) return false;
  }
  if (parameter.const_data_ptr() != parameter_data) return false;
  return dense_parameter.defined() ? parameter.sizes() == dense_parameter.sizes()
                                   : same_layout(parameter, state->exp_avg());
}

void AdamEntry::remember() {
  parameter_data = parameter.const_data_ptr();
  const auto now = tensors_of(*state);
  for (size_t i = 0; i < now.size(); ++i) {
    state_tensors[i] = *now[i];
    state_data[i] = data_of(*now[i]);
  }
}

at::ScalarType state_dtype(AdamStorage storage) {
  if (storage == AdamStorage::f64) return at::kDouble;
  return storage == AdamStorage::bf16 ? at::kBFloat16 : at::kFloat;
}

kernels::GradientType gradient_type(AdamStorage storage) {
  if (storage == AdamStorage::f64) return kernels::GradientType::f64;
  if (storage == AdamStorage::f32) return kernels::GradientType::f32;
  return storage == AdamStorage::f16_master ? kernels::GradientType::f16 : kernels::GradientType::bf16;
}

void* pointer_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

bool needs_dense_gradient(const AdamEntry& entry, const at::Tensor& gradient) {
  return !same_layout(gradient, entry.memory()) || gradient.is_neg() || gradient._is_zerotensor();
}

void check_state(const FusedAdamStateFields& state, const at::Tensor& parameter, const std::string& name) {
  const auto check = [&](const at::Tensor& tensor, const char* field, bool integer) {
    if (!tensor.defined()) return;
    require(tensor.sizes() == parameter.sizes(), "the state of parameter ", name, " has ", field,
            " of shape ", tensor.sizes(), " but the parameter has ", parameter.sizes());
    const bool right_kind = integer ? tensor.scalar_type() == at::kShort : tensor.is_floating_point();
    require(right_kind && tensor.layout() == at::kStrided, "the state of parameter ", name, " has ", field,
            " of dtype ", tensor.scalar_type(), " and layout ", tensor.layout(), "; it must be ",
            integer ? "int16" : "floating point", " and dense");
  };
  check(state.exp_avg(), "exp_avg", false);
  check(state.exp_avg_sq(), "exp_avg_sq", false);
  check(state.max_exp_avg_sq(), "max_exp_avg_sq", false);
  check(state.master(), "master", false);
  check(state.remainder(), "remainder", true);
  const at::Tensor& average = state.trust_average();
  require(
      !average.defined() || (average.scalar_type() == at::kDouble && average.sizes() == at::IntArrayRef{2}),
      "the state of parameter ", name, " has a trust_average that is not two fp64 numbers");
}

void prepare_state(std::vector<AdamEntry>& entries) {
  using Fields = FusedAdamStateFields;
  const auto always = [](const AdamEntry&) { return true; };
  const auto moments = [](const AdamEntry& e) { return state_dtype(e.storage); };
  prepare_field(entries, &Fields::exp_avg, always, moments);
  prepare_field(entries, &Fields::exp_avg_sq, always, moments);
  prepare_field(
      entries, &Fields::max_exp_avg_sq, [](const AdamEntry& e) { return e.amsgrad; }, moments);

  const auto masters = prepare_field(
      entries, &Fields::master, [](const AdamEntry& e) { return has_master(e.storage); },
      [](const AdamEntry&) { return at::kFloat; });
  for (AdamEntry* entry : masters) {
    const at::Tensor& remainder = entry->state->remainder();
    at::Tensor& master = entry->state->master();
    if (remainder.defined() && entry->parameter.scalar_type() == at::kBFloat16) {
      master.copy_(join(entry->parameter, remainder.to(entry->parameter.device())));
      entry->parameter.copy_(
          master);  // a master copy is rounded to nearest even, a remainder half away from zero
    } else {
      master.copy_(entry->parameter);
    }
  }
  const auto remainders = prepare_field(
      entries, &Fields::remainder,
      [](const AdamEntry& e) { return e.storage == AdamStorage::bf16_remainder; },
      [](const AdamEntry&) { return at::kShort; });
  for (AdamEntry* entry : remainders) {
    if (entry->state->master().defined()) remainder_from_master(*entry);
  }
  for (AdamEntry& entry : entries) {
    if (!has_master(entry.storage)) entry.state->master(at::Tensor());
    if (entry.storage != AdamStorage::bf16_remainder) entry.state->remainder(at::Tensor());
    prepare_trust_average(entry);
  }
}

void follow_parameter(AdamEntry& entry) {
  if (!has_master(entry.storage)) return;
  at::Tensor& master = entry.state->master();
  const at::Tensor differs = master.to(entry.parameter.scalar_type()).ne(entry.parameter);
  master.copy_(at::where(differs, entry.parameter.to(at::kFloat), master));
}

}  // namespace pacer::detail
