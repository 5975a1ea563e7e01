// The state tensors of entries: created in arenas, converted where dtype, layout, place or master weights
// have changed.
#include <cmath>
#include <map>
#include <type_traits>

#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>
#include <pacer/core/tile.h>
#include <pacer/optimizers/detail/moment_codes.h>
#include <pacer/optimizers/detail/remainder_values.h>
#include <pacer/optimizers/detail/state_memory.h>

namespace pacer::detail {
namespace {

using kernels::AdamStorage;

constexpr int64_t kArenaAlignment = 128;  // elements

// The dtype of tensors whose elements are of that type.
template <class Element>
constexpr at::ScalarType kDtypeOf = std::is_same_v<Element, double>              ? at::kDouble
                                    : std::is_same_v<Element, kernels::BFloat16> ? at::kBFloat16
                                    : std::is_same_v<Element, uint16_t>          ? at::kShort
                                    : std::is_same_v<Element, int8_t>            ? at::kChar
                                                                                 : at::kFloat;

// One arena for all entries of a call; each gets a view in its own layout.
class DeviceArenas final : public StateMemory {
 public:
  bool may_stay(const ParameterEntry& entry, const at::Tensor& tensor) const override {
    return tensor.device() == entry.memory.device();
  }
  std::vector<at::Tensor> make(const std::vector<ParameterEntry*>& entries, const StateField& /*field*/,
                               at::ScalarType dtype) override {
    int64_t elements = 0;
    for (const ParameterEntry* entry : entries) elements += round_up(entry->range.count, kArenaAlignment);
    const at::Tensor arena =
        at::zeros({elements}, entries.front()->parameter.options().dtype(dtype).requires_grad(false));
    std::vector<at::Tensor> made;
    int64_t offset = 0;
    for (const ParameterEntry* entry : entries) {
      const at::Tensor& memory = entry->memory;
      made.push_back(arena.as_strided(memory.sizes(), memory.strides(), offset));
      offset += round_up(memory.numel(), kArenaAlignment);
    }
    return made;
  }
};

void write_parameter(ParameterEntry& entry, const at::Tensor& values) {
  entry.memory.copy_(values);
  if (entry.dense_parameter.defined()) entry.parameter.copy_(entry.dense_parameter);
}

// A new master copy: from the remainder where there is one, else from the parameter.
void fill_master(ParameterEntry& entry) {
  const at::Tensor& remainder = entry.state->remainder();
  at::Tensor& master = entry.state->master();
  if (remainder.defined() && entry.parameter.scalar_type() == at::kBFloat16) {
    master.copy_(joined_value(entry.memory, remainder.to(entry.parameter.device())));
    // A master copy is rounded to nearest even, a remainder of 16 bits half away from zero.
    write_parameter(entry, master);
  } else {
    master.copy_(entry.memory);
  }
}

// Keeps an fp32 value in parameter and remainder: exactly in 16 bits, rounded in 8.
void fill_remainder(ParameterEntry& entry, const at::Tensor& value) {
  at::Tensor& remainder = entry.state->remainder();
  const SplitValue parts = split_value(value, remainder.scalar_type());
  remainder.copy_(parts.remainder);
  write_parameter(entry, parts.rounded);
}

// A new remainder: of a former master copy, where there is one.
void fill_remainder(ParameterEntry& entry) {
  if (!entry.state->master().defined()) return;
  fill_remainder(entry, entry.state->master().to(entry.parameter.device()).to(at::kFloat).contiguous());
}

// A remainder of the other width, from the value that the former one stands for.
void change_remainder(ParameterEntry& entry, at::ScalarType dtype, const StateField& field,
                      StateMemory& memory) {
  at::Tensor& remainder = entry.state->remainder();
  const at::Tensor value = joined_value(entry.memory, remainder.to(entry.parameter.device()));
  remainder = memory.make({&entry}, field, dtype).front();
  fill_remainder(entry, value);
}

// Creates the field where missing (zeros), converts it where it does not fit. Returns the entries it created.
std::vector<ParameterEntry*> prepare_field(std::vector<ParameterEntry>& entries, const StateField& field,
                                           StateMemory& memory) {
  std::map<at::ScalarType, std::vector<ParameterEntry*>> missing;
  std::vector<ParameterEntry*> created;
  for (ParameterEntry& entry : entries) {
    const auto dtype = dtype_of(entry, field);
    if (!dtype) continue;
    at::Tensor& tensor = (entry.state->*field.get)();
    if (!tensor.defined()) {
      missing[*dtype].push_back(&entry);
      created.push_back(&entry);
    } else if (is_coded(field.kind) && are_codes(tensor)) {
      continue;  // decode_unfit has left what fits
    } else if (is_coded(field.kind) && entry.state_bits == 8) {
      encode_field(entry, field, memory);
    } else if (field.kind == StateKind::remainder && tensor.scalar_type() != *dtype) {
      change_remainder(entry, *dtype, field, memory);
    } else if (tensor.scalar_type() != *dtype || !memory.may_stay(entry, tensor) ||
               !same_layout(tensor, entry.memory)) {
      const at::Tensor converted = memory.make({&entry}, field, *dtype).front();
      converted.copy_(tensor);
      tensor = converted;
    }
  }
  for (const auto& [dtype, group] : missing) {
    const std::vector<at::Tensor> made = memory.make(group, field, dtype);
    for (size_t i = 0; i < group.size(); ++i) (group[i]->state->*field.get)() = made[i];
  }
  return created;
}

// A field that is not elementwise: zeros where they are missing, on the parameter's device.
void prepare_small(ParameterEntry& entry, const StateField& field) {
  const auto dtype = dtype_of(entry, field);
  if (!dtype) return;
  at::Tensor& tensor = (entry.state->*field.get)();
  const auto options = at::TensorOptions().dtype(*dtype).device(entry.parameter.device());
  tensor = tensor.defined() ? tensor.to(options).contiguous()
                            : at::zeros(field_sizes(field.kind, entry.parameter.sizes()), options);
}

}  // namespace

std::optional<at::ScalarType> dtype_of(const ParameterEntry& entry, const StateField& field) {
  GroupSettings settings;
  settings.amsgrad = entry.amsgrad;
  settings.has_first_moment = entry.has_first_moment;
  settings.has_second_moment = entry.has_second_moment;
  settings.averages_trust = entry.averages_trust;
  settings.muon = entry.muon;
  settings.state_bits = entry.state_bits;
  if (entry.is_compressed && field.get == kStateFields[0].get)
    return std::nullopt;  // the momentum lies elsewhere
  return field_dtype(field.kind, entry.storage, settings);
}

void check_average(const kernels::AverageWeights& average, const std::string& what) {
  for (const AverageNumber& number : kAverageNumbers) {
    const double value = average.*number.value;
    require(std::isfinite(value) && value >= 0, what, " has ", number.name, " ", value,
            ", which must be a finite number >= 0");
  }
}

std::optional<at::ScalarType> field_dtype(StateKind kind, AdamStorage storage,
                                          const GroupSettings& settings) {
  return kernels::with_storage(storage, [&](auto chosen) {
    using Types = kernels::StorageOf<chosen()>;
    constexpr auto kOfMoments = kDtypeOf<typename Types::State>, kOfExtra = kDtypeOf<typename Types::Extra>;
    const auto where = [](bool exists, at::ScalarType dtype) {
      return exists ? std::optional(dtype) : std::nullopt;
    };
    const bool in_codes = settings.state_bits == 8;
    switch (kind) {
      case StateKind::moment:
        return where(settings.has_first_moment, in_codes ? codes_dtype(kind) : kOfMoments);
      case StateKind::second_moment:
        return where(settings.has_second_moment, in_codes ? codes_dtype(kind) : kOfMoments);
      case StateKind::max_moment:
        return where(settings.amsgrad, kOfMoments);
      case StateKind::master:
        return where(Types::kHasExtra && kOfExtra == at::kFloat, kOfExtra);
      case StateKind::remainder:
        return where(is_remainder_dtype(kOfExtra), kOfExtra);
      case StateKind::row_moment:
        return where(settings.muon && settings.muon->normalizes_rows, kDtypeOf<typename Types::Real>);
      case StateKind::moment_scale:
        return where(in_codes, at::kHalf);
      case StateKind::second_moment_scale:
        return where(in_codes && settings.has_second_moment, at::kHalf);
      case StateKind::trust_average:
        break;
    }
    return where(settings.averages_trust, at::kDouble);
  });
}

void prepare_state(std::vector<ParameterEntry>& entries, StateMemory& memory) {
  for (ParameterEntry& entry : entries) {
    if (entry.dense_parameter.defined()) entry.dense_parameter.copy_(entry.parameter);
  }
  decode_unfit(entries, memory);
  for (const StateField& field : kStateFields) {
    if (is_scale(field.kind)) continue;
    if (!is_elementwise(field.kind)) {
      for (ParameterEntry& entry : entries) prepare_small(entry, field);
      continue;
    }
    const std::vector<ParameterEntry*> created = prepare_field(entries, field, memory);
    for (ParameterEntry* entry : created) {
      if (field.kind == StateKind::master) fill_master(*entry);
      if (field.kind == StateKind::remainder) fill_remainder(*entry);
      if (field.kind == StateKind::moment && entry->starts_at_gradient) entry->state->step(0);
    }
  }
  prepare_scales(entries);
  for (ParameterEntry& entry : entries) {
    if (!entry.has_first_moment) entry.state->exp_avg(at::Tensor());
    if (!entry.has_second_moment) entry.state->exp_avg_sq(at::Tensor());  // somebody else's
    if (!dtype_of(entry, kStateFields[3])) entry.state->master(at::Tensor());
    if (!dtype_of(entry, kStateFields[4])) entry.state->remainder(at::Tensor());
    if (!dtype_of(entry, kStateFields[6])) entry.state->row_moment(at::Tensor());
  }
}

void prepare_state(std::vector<ParameterEntry>& entries) {
  DeviceArenas arenas;
  prepare_state(entries, arenas);
}

}  // namespace pacer::detail
