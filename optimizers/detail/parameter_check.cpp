#include <pacer/optimizers/detail/parameter_check.h>

#include <algorithm>
#include <optional>
#include <ostream>
#include <unordered_set>

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
std::string place_of(size_t group, size_t index) { return concatenate(index, " of group ", group); }

}  // namespace

std::string name_of(const ParameterNames& names, const at::Tensor& parameter, size_t group, size_t index) {
  const auto found = names.find(parameter.unsafeGetTensorImpl());
  return found != names.end() ? found->second : concatenate(group, ".", index);
}

std::ostream& operator<<(std::ostream& out, const InMessage& parameter) {
  const std::string& name = parameter.name;
  const size_t dot = name.find('.');
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  if (dot == std::string::npos || !is_number(name.substr(0, dot)) || !is_number(name.substr(dot + 1))) {
    return out << name;
  }
  out << name.substr(dot + 1) << " of group " << name.substr(0, dot) << " (";
  if (parameter.sizes) out << "shape " << *parameter.sizes << "; ";
  return out << "make the optimizer of named_parameters() to see names)";
}

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

void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups, const ParameterNames& names) {
  std::unordered_map<const void*, std::string> seen;
  std::optional<std::pair<at::Device, std::string>> first;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = name_of(names, parameters[i], g, i);
      check_parameter(parameters[i], name);
      const auto [earlier, is_new] = seen.emplace(parameters[i].unsafeGetTensorImpl(), place_of(g, i));
      require(is_new, "parameter ", InMessage{name, parameters[i].sizes()}, " is given twice, as number ",
              earlier->second, " and as number ", place_of(g, i),
              "; pass each tensor once (tied weights, too)");
      const at::Device device = parameters[i].device();
      if (!first) first.emplace(device, name);
      require(device == first->first, "parameter ", InMessage{name, parameters[i].sizes()}, " is on ", device,
              " but ", InMessage{first->second}, " is on ", first->first,
              "; make one optimizer per device or move the model as a whole");
    }
  }
}

void check_names(const std::vector<torch::optim::OptimizerParamGroup>& groups, const ParameterNames& names) {
  std::unordered_map<std::string, std::string> seen;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string name = name_of(names, parameters[i], g, i), place = place_of(g, i);
      const auto [earlier, is_new] = seen.emplace(name, place);
      require(is_new, "two parameters, number ", earlier->second, " and number ", place, ", are called \"",
              name,
              "\", and state is saved by name; give each group's names a prefix of its own, or pass "
              "model->named_parameters() in parts");
    }
  }
}

void check_compressible(const char* optimizer, const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        const std::vector<AdamGroupSettings>& settings, const ParameterNames& names) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!settings[g].compress) continue;
    const auto& parameters = groups[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& parameter = parameters[i];
      const std::string name = name_of(names, parameter, g, i);
      const InMessage called{name, parameter.sizes()};
      require(
          parameter.scalar_type() != at::kDouble, optimizer, ": parameter ", called,
          " is fp64, but momentum is compressed from fp32; make the model fp32, or put the parameter into a "
          "group with compress(false)");
      require(parameter.is_non_overlapping_and_dense(), optimizer, ": parameter ", called,
              " has gaps between its elements; pass a contiguous one, or put it into a group with "
              "compress(false)");
    }
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
