#include <pacer/optimizers/detail/parameter_check.h>

#include <algorithm>
#include <optional>

#include <torch/optim/optimizer.h>

#include <pacer/core/error.h>

namespace pacer::detail {

namespace {

// True if no two elements can be in one memory location: each dimension steps over all that smaller ones
// reach. Exotic strides that interleave without meeting are refused with the rest.
bool elements_are_apart(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return true;
    if (tensor.size(d) > 1) dimensions.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);
  }
  return true;
}

// As a message says it.
std::string place_of(const RegisteredParameter& parameter) {
  return concatenate("number ", parameter.index, " of group ", parameter.group);
}

// The parameter is defined and sound in itself.
void check_parameter(const at::Tensor& parameter, const std::string& name) {
  require(parameter.defined(), "parameter ", InMessage{name}, " is undefined");
  const InMessage called{name, parameter.sizes()};
  require(parameter.layout() == at::kStrided, "parameter ", called, " is ", parameter.layout(),
          ", but fused optimizers need dense (strided) parameters");
  const at::ScalarType dtype = parameter.scalar_type();
  require(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
          "parameter ", called, " has dtype ", dtype, "; supported are float, double, bfloat16 and half");
  require(parameter.device().is_cpu() || parameter.device().is_cuda(), "parameter ", called, " is on ",
          parameter.device(), "; supported are the CPU and CUDA devices");
  require(elements_are_apart(parameter), "parameter ", called,
          " holds several elements in one memory location (an expanded tensor?); pass a clone");
  require(!parameter.is_neg(), "parameter ", called, " is a negated view; pass a clone");
  require(!parameter.is_inference(), "parameter ", called,
          " was made under InferenceMode, whose tensors keep no count of their changes, so that it cannot be "
          "trained; "
          "make the model outside of it, or use NoGradGuard there");
}

}  // namespace

void check_groups(const ParamGroups& groups, const TensorNames& names) {
  std::unordered_map<const void*, std::string> seen;
  std::optional<RegisteredParameter> first;
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const at::Tensor& tensor = parameter.tensor;
    check_parameter(tensor, parameter.name);
    const auto [earlier, is_new] = seen.emplace(parameter.key(), place_of(parameter));
    require(is_new, "parameter ", parameter.in_message(), " is given twice, as ", earlier->second, " and as ",
            place_of(parameter), "; pass each tensor once (tied weights, too)");
    if (!first) first = parameter;
    require(tensor.device() == first->tensor.device(), "parameter ", parameter.in_message(), " is on ",
            tensor.device(), " but ", InMessage{first->name}, " is on ", first->tensor.device(),
            "; make one optimizer per device or move the model as a whole");
  }
}

void check_names(const ParamGroups& groups, const TensorNames& names) {
  std::unordered_map<std::string, std::string> seen;
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const auto [earlier, is_new] = seen.emplace(parameter.name, place_of(parameter));
    require(is_new, "two parameters, ", earlier->second, " and ", place_of(parameter), ", are called \"",
            parameter.name,
            "\", and state is saved by name; give each group's names a prefix of its own, or pass "
            "model->named_parameters() in parts");
  }
}

void check_compressible(const char* optimizer, const ParamGroups& groups,
                        const std::vector<GroupSettings>& settings, const TensorNames& names) {
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const at::Tensor& tensor = parameter.tensor;
    if (!settings[parameter.group].compresses(tensor)) continue;
    const InMessage called = parameter.in_message();
    require(
        tensor.scalar_type() != at::kDouble, optimizer, ": parameter ", called,
        " is fp64, but momentum is compressed from fp32; make the model fp32, or put the parameter into a "
        "group with compress(false)");
    require(tensor.is_non_overlapping_and_dense(), optimizer, ": parameter ", called,
            " has gaps between its elements; pass a contiguous one, or put it into a group with "
            "compress(false)");
  }
}

void check_matrices(const char* optimizer, const ParamGroups& groups,
                    const std::vector<GroupSettings>& settings, const TensorNames& names) {
  for (const RegisteredParameter& parameter : registered(groups, names)) {
    const std::optional<MuonSettings>& muon = settings[parameter.group].muon;
    if (!muon) continue;
    const at::Tensor& tensor = parameter.tensor;
    const InMessage called = parameter.in_message();
    require(
        tensor.dim() >= 2 && tensor.numel() > 0, optimizer, ": parameter ", called, " of shape ",
        tensor.sizes(),
        " is no matrix that could be orthogonalised; put it into a group with orthogonalize(false), which "
        "takes AdamW (muon_groups sorts the parameters of a model)");
    require(tensor.size(0) % muon->split == 0, optimizer, ": parameter ", called, " of shape ",
            tensor.sizes(), " has ", tensor.size(0), " rows, which cannot be split into ", muon->split,
            " matrices of equal size; choose a split that divides them");
  }
}

void check_gradient(const at::Tensor& parameter, const at::Tensor& gradient, const std::string& name) {
  const InMessage called{name, parameter.sizes()};
  require(gradient.layout() == at::kStrided, "the gradient of parameter ", called, " is ", gradient.layout(),
          "; fused optimizers do not support sparse gradients, use dense ones");
  require(gradient.scalar_type() == parameter.scalar_type(), "the gradient of parameter ", called,
          " has dtype ", gradient.scalar_type(), " but the parameter has ", parameter.scalar_type(),
          "; clear gradients after changing a parameter's dtype");
  require(gradient.device() == parameter.device(), "the gradient of parameter ", called, " is on ",
          gradient.device(), " but the parameter is on ", parameter.device(),
          "; clear gradients after moving a parameter");
  require(gradient.sizes() == parameter.sizes(), "the gradient of parameter ", called, " has shape ",
          gradient.sizes(), " but the parameter has ", parameter.sizes());
}

kernels::AdamStorage storage_for(at::ScalarType dtype, MasterWeights master_weights, Rounding rounding,
                                 const std::string& name) {
  using kernels::AdamStorage;
  if (dtype == at::kDouble) return AdamStorage::f64;
  if (dtype == at::kFloat) return AdamStorage::f32;
  if (dtype == at::kHalf) {
    require(master_weights == MasterWeights::automatic || master_weights == MasterWeights::fp32, "parameter ",
            InMessage{name},
            " is fp16, which needs MasterWeights::fp32 (or automatic): its range is too small to go without");
    return AdamStorage::f16_master;
  }
  if (master_weights == MasterWeights::fp32) return AdamStorage::bf16_master;
  if (master_weights == MasterWeights::remainder_8) return AdamStorage::bf16_correction;
  if (master_weights != MasterWeights::none) return AdamStorage::bf16_remainder;
  return rounding == Rounding::stochastic ? AdamStorage::bf16_stochastic : AdamStorage::bf16;
}

MemoryRange memory_range(const at::Tensor& tensor, size_t parameter, bool written) {
  const char* begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t extent = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && extent != 0; ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  return {begin, begin + extent * static_cast<int64_t>(tensor.element_size()), parameter, written};
}

void check_disjoint(std::vector<MemoryRange>& ranges, const std::vector<std::string>& names) {
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(), [](const auto& r) { return r.begin == r.end; }),
               ranges.end());
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  const auto check = [&](const MemoryRange& a, const MemoryRange& b) {
    require(a.parameter == b.parameter || !(a.written || b.written), "parameters ",
            InMessage{names[a.parameter]}, " and ", InMessage{names[b.parameter]},
            " share memory (one's value or gradient lies inside the other); pass a clone of one");
  };
  std::vector<MemoryRange> open;
  for (const MemoryRange& range : ranges) {
    open.erase(std::remove_if(open.begin(), open.end(), [&](const auto& r) { return r.end <= range.begin; }),
               open.end());
    for (const MemoryRange& earlier : open) check(earlier, range);
    open.push_back(range);
  }
}

}  // namespace pacer::detail
