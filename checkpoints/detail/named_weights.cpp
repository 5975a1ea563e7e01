#include <pacer/checkpoints/detail/named_weights.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <pacer/checkpoints/detail/shared_memory.h>
#include <pacer/checkpoints/detail/tensor_file.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/deferred_storage.h>
#include <pacer/hooks/detail/training_tensors.h>

namespace pacer::detail {
namespace {

// "a", "b", "c" and 4 more
std::string first_few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", \"" : "\"") + names[i] + '"';
  if (names.size() > kShown) text += concatenate(" and ", names.size() - kShown, " more");
  return text;
}

// What keeps the tensor of the file from the model's; empty where it fits.
std::string misfit(const std::string& name, const at::Tensor& own, at::ScalarType dtype,
                   at::IntArrayRef sizes) {
  const bool converts = at::isFloatingType(own.scalar_type()) && at::isFloatingType(dtype);
  if (own.sizes() == sizes && (converts || own.scalar_type() == dtype)) return "";
  return concatenate("\"", name, "\" is ", dtype, " of shape ", sizes, " there, but ", own.scalar_type(),
                     " of shape ", own.sizes(), " in the model");
}

// Names by what becomes of them; throws where the options do not allow it.
LoadedWeights compare(const NamedTensors& model, const std::map<std::string, TensorView>& in_files,
                      const QuantizedWeights& quantized, const std::string& where,
                      const LoadWeightsOptions& options) {
  LoadedWeights weights;
  weights.file = where;
  std::vector<std::string> misfits = quantized.misfits();
  std::unordered_map<const void*, bool> has_values;  // by TensorImpl
  for (const auto& [name, tensor] : model) {
    const auto found = in_files.find(name);
    has_values[tensor.unsafeGetTensorImpl()] |= found != in_files.end();
    if (found == in_files.end()) continue;
    const std::string reason = misfit_in_file(name, tensor, found->second);
    if (!reason.empty()) misfits.push_back(reason);
  }
  weights.loaded.assign(quantized.weights().begin(), quantized.weights().end());
  for (const auto& [name, tensor] : model) {
    (has_values.at(tensor.unsafeGetTensorImpl()) ? weights.loaded : weights.missing).push_back(name);
  }
  std::sort(weights.loaded.begin(), weights.loaded.end());
  for (const auto& item : in_files) {
    if (model.count(item.first) == 0 && !quantized.takes_from_file(item.first)) {
      weights.unexpected.push_back(item.first);
    }
  }

  std::string wrong;
  const auto add = [&](const std::string& text) { wrong += (wrong.empty() ? "" : "; ") + text; };
  if (!misfits.empty()) {
    add(misfits.front());
    if (misfits.size() > 1) add(concatenate(misfits.size() - 1, " more do not fit either"));
  }
  if (!options.allow_missing() && !weights.missing.empty()) {
    add("it has no " + first_few(weights.missing) + ", which allow_missing(true) leaves as they are");
  }
  if (!options.allow_unexpected() && !weights.unexpected.empty()) {
    add("the model has no " + first_few(weights.unexpected) + ", which allow_unexpected(true) passes over");
  }
  require(wrong.empty(), "cannot load weights from ", where, ": ", wrong);
  return weights;
}

// Memory of parameters that Shards has released answers with an error.
void check_values_are_here(const NamedTensors& model) {
  for (const auto& [name, tensor] : model) {
    if (tensor.layout() != at::kStrided) continue;
    require(!is_deferred(tensor), "cannot load weights into \"", name,
            "\": defer_initialization took its memory; give Shards "
            "ShardsOptions().materialize(load_blocks(path)), which loads block by block");
    try {
      (void)tensor.const_data_ptr();
    } catch (const c10::Error&) {
      throw InvalidArgument(
          concatenate("cannot load weights into \"", name,
                      "\": a Session's Shards keeps parts of it; load before that Session begins, or while "
                      "session.whole_parameters() exists"));
    }
  }
}

}  // namespace

std::map<std::string, TensorView> tensors_of(const std::vector<SafetensorsFile>& files) {
  std::map<std::string, TensorView> tensors;
  for (const SafetensorsFile& file : files) {
    for (const std::string_view name : file.names()) tensors.emplace(name, *file.find(name));
  }
  return tensors;
}

std::string misfit_in_file(const std::string& name, const at::Tensor& own, const TensorView& there) {
  if (there.dtype == Dtype::OTHER) {
    return concatenate("\"", name, "\" has the dtype ", there.dtype_text,
                       " there, which pacer does not know");
  }
  return misfit(name, own, tensor_dtype(there.dtype), there.shape);
}

LoadedWeights load_named(NamedTensors tensors, const WeightsFiles& files,
                         const std::map<std::string, TensorView>& in_files, QuantizedWeights& quantized,
                         const LoadWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  const std::string cannot = "cannot load weights from " + files.where + ": ";
  for (auto item = tensors.begin(); item != tensors.end();) {
    item = quantized.takes_from_model(item->first) ? tensors.erase(item) : std::next(item);
  }
  check_values_are_here(tensors);
  NamedTensors found;
  for (const auto& item : tensors) {
    if (in_files.count(item.first) != 0) found.insert(item);
  }
  check_writable(found);
  LoadedWeights weights = compare(tensors, in_files, quantized, files.where, options);
  NamedTensors values =
      read_values(files, [&](const std::string& name, at::IntArrayRef) -> std::optional<at::Device> {
        if (quantized.takes_from_file(name)) return quantized.place_of(name);
        const auto own = tensors.find(name);
        return own == tensors.end() ? std::nullopt : std::optional(own->second.device());
      });
  NamedTensors parts;  // of weights in 4 bits
  // The file may have changed since its header was compared.
  std::unordered_map<const void*, const NamedTensors::value_type*> first_of;
  for (auto item = values.begin(); item != values.end();) {
    const auto& [name, value] = *item;
    if (quantized.takes_from_file(name)) {
      parts.insert(values.extract(item++));
      continue;
    }
    const at::Tensor& own = tensors.at(name);
    const std::string reason = misfit(name, own, value.scalar_type(), value.sizes());
    require(reason.empty(), cannot, reason);
    const auto [twin, is_first] = first_of.emplace(own.unsafeGetTensorImpl(), &*item);
    require(is_first || twin->second->second.equal(value), cannot, "\"", twin->second->first, "\" and \"",
            name, "\" are one tensor in the model, but differ there");
    ++item;
  }
  const std::string conflict = conflict_in_memory(tensors, values);
  require(conflict.empty(), cannot, conflict, " there");
  try {
    quantized.build(parts);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(cannot + error.what());
  } catch (const FileError& error) {
    throw FileError(cannot + error.what());
  }
  for (const auto& [name, value] : values) tensors.at(name).copy_(value);
  quantized.put_in_force();
  return weights;
}

}  // namespace pacer::detail
