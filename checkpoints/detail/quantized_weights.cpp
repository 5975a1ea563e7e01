#include <pacer/checkpoints/detail/quantized_weights.h>

#include <cstring>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/module.h>

#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/checkpoints/detail/quant_state.h>
#include <pacer/core/error.h>
#include <pacer/kernels/nf4.h>
#include <pacer/modules/detail/layer_targets.h>

namespace pacer::detail {
namespace {

using FileTensors = std::map<std::string, TensorView>;

const char* const kParts[] = {"absmax", "quant_map", "nested_absmax", "nested_quant_map"};

// "LAYER.weight"; the model's own weight where the model is the layer.
std::string weight_name(const std::string& layer) { return layer.empty() ? "weight" : layer + ".weight"; }

// A name in a sentence.
std::string quoted(const std::string& name) { return '"' + name + '"'; }

std::string sizes_text(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

at::Device device_of(const modules::LinearImpl& layer) {
  return layer.nf4() ? layer.nf4()->codes.device() : layer.weight.device();
}

const TensorView* find_tensor(const FileTensors& tensors, const std::string& name) {
  const auto found = tensors.find(name);
  return found == tensors.end() ? nullptr : &found->second;
}

// The names that start with the prefix and a dot.
std::vector<std::string> names_under(const FileTensors& tensors, const std::string& prefix) {
  std::vector<std::string> names;
  for (auto item = tensors.lower_bound(prefix + '.');
       item != tensors.end() && item->first.compare(0, prefix.size() + 1, prefix + '.') == 0; ++item) {
    names.push_back(item->first);
  }
  return names;
}

// Of "LAYER.weight.quant_state.bitsandbytes__KIND" the name of the weight; nothing for any other name.
std::optional<std::string> weight_of_quant_state(const std::string& name) {
  const size_t at = name.rfind(std::string(".") + kQuantStatePrefix);
  if (at == std::string::npos) return std::nullopt;
  return name.substr(0, at);
}

bool is_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

}  // namespace

QuantizedWeights::QuantizedWeights(torch::nn::Module& model, const FileTensors& in_files)
    : linears_(linear_names(model)) {
  find_layers(model, in_files);
  find_other_storage(in_files);
  if (layers_.empty()) return;
  std::vector<NamedLinear> layers;
  for (const auto& [name, found] : layers_) layers.push_back({name, found.layer});
  try {
    check_changeable("a weight in 4 bits", model, layers);
  } catch (const InvalidArgument& error) {
    misfits_.emplace_back(error.what());
  }
}

void QuantizedWeights::find_layers(torch::nn::Module& model, const FileTensors& in_files) {
  std::set<std::string> seen;
  for (const auto& item : in_files) {
    const std::optional<std::string> weight = weight_of_quant_state(item.first);
    if (!weight || !seen.insert(*weight).second) continue;
    const bool is_root = *weight == "weight";
    const bool is_weight =
        is_root || (weight->size() > 7 && weight->compare(weight->size() - 7, 7, ".weight") == 0);
    const std::string name = is_root || !is_weight ? "" : weight->substr(0, weight->size() - 7);
    const auto linear = is_weight ? linears_.find(name) : linears_.end();
    if (linear != linears_.end()) {
      check_parts(name, *linear->second, in_files);
      continue;
    }
    // A module of the model that cannot have 4 bits is named; one that the model lacks is unexpected.
    bool is_module = false;
    for (const auto& module : model.named_modules("", /*include_self=*/false)) {
      is_module |= is_weight && module.key() == name;
    }
    if (!is_module && !is_root) continue;
    misfits_.push_back(concatenate(quoted(*weight), " is in 4 bits there, but ",
                                   is_root ? "the model" : quoted(name),
                                   " is no pacer::modules::Linear, which alone can be"));
    file_names_.insert(*weight);
    for (const std::string& part : names_under(in_files, *weight)) file_names_.insert(part);
    model_names_.insert(*weight);
  }
}

void QuantizedWeights::check_parts(const std::string& name, const modules::LinearImpl& layer,
                                   const FileTensors& in_files) {
  const std::string weight = weight_name(name);
  file_names_.insert(weight);
  for (const std::string& part : names_under(in_files, weight)) file_names_.insert(part);
  claim_model(linears_.at(name));

  const int64_t out = layer.options.out_features(), in = layer.options.in_features(), count = out * in;
  const std::string of = concatenate(quoted(weight), " is in 4 bits there, but ");
  const auto fails = [&](const auto&... parts) { misfits_.push_back(concatenate(of, parts...)); };
  std::set<std::string> known = {weight + "." + kNf4QuantState};
  for (const char* part : kParts) known.insert(weight + "." + part);
  for (const std::string& part : names_under(in_files, weight)) {
    if (known.count(part) > 0) continue;
    if (weight_of_quant_state(part)) {
      const std::string kind = part.substr(weight.size() + 1 + std::strlen(kQuantStatePrefix));
      return fails("of the kind ", quoted(kind), "; pacer knows nf4 alone");
    }
    return fails(quoted(part), " is no part of such a weight");
  }
  const TensorView* absmax = find_tensor(in_files, weight + ".absmax");
  if (absmax == nullptr) return fails("it has no ", quoted(weight + ".absmax"));
  const bool nested = absmax->dtype == Dtype::U8;
  const int64_t blocks = kernels::nf4_blocks(count), nested_blocks = kernels::nf4_nested_blocks(count);
  struct Part {
    std::string name;
    Dtype dtype;
    std::vector<int64_t> shape;
  };
  std::vector<Part> parts = {{weight, Dtype::U8, {kernels::nf4_bytes(count), 1}},
                             {weight + ".absmax", nested ? Dtype::U8 : Dtype::F32, {blocks}},
                             {weight + ".quant_map", Dtype::F32, {16}}};
  if (nested) {
    parts.push_back({weight + ".nested_absmax", Dtype::F32, {nested_blocks}});
    parts.push_back({weight + ".nested_quant_map", Dtype::F32, {256}});
  }
  for (const Part& part : parts) {
    const TensorView* found = find_tensor(in_files, part.name);
    if (found == nullptr) return fails("it has no ", quoted(part.name));
    if (found->dtype == part.dtype && found->shape == part.shape) continue;
    return fails(quoted(part.name), " is ", dtype_name(found->dtype), " of shape ", sizes_text(found->shape),
                 ", where a layer of ", out, " x ", in, " in blocks of ", kernels::kNf4Block, " has ",
                 dtype_name(part.dtype), " of shape ", sizes_text(part.shape));
  }
  if (!nested) {
    for (const char* part : {"nested_absmax", "nested_quant_map"}) {
      if (find_tensor(in_files, weight + "." + part) == nullptr) continue;
      return fails("it has ", quoted(weight + "." + part), " although its scales are not quantised");
    }
  }
  const TensorView* state = find_tensor(in_files, weight + "." + kNf4QuantState);
  if (state->dtype != Dtype::U8 || state->shape.size() != 1) {
    return fails("its ", kNf4QuantState, " is not a row of U8");
  }
  constexpr size_t kLongestState = 1 << 16;  // bytes; bitsandbytes writes some 200
  if (state->bytes > kLongestState) {
    return fails("its ", kNf4QuantState, " has ", state->bytes, " bytes; the limit is ", kLongestState);
  }
  for (const auto& [other, found] : layers_) {
    if (found.layer != &layer) continue;
    return fails("the layer is also ", quoted(other), " in the model, which the file has in 4 bits, too");
  }
  layers_.emplace(name, Layer{linears_.at(name), nested, nullptr});
  for (const Part& part : parts) {
    if (part.name != weight + ".quant_map") places_.emplace(part.name, device_of(layer));
  }
}

// Layers whose weight is in 4 bits on one side alone, in files without bitsandbytes' layout.
void QuantizedWeights::find_other_storage(const FileTensors& in_files) {
  for (const auto& [name, layer] : linears_) {
    const std::string weight = weight_name(name);
    if (file_names_.count(weight) > 0) continue;
    const TensorView* plain = find_tensor(in_files, weight);
    const TensorView* codes = find_tensor(in_files, weight + ".codes");
    if (layer->nf4() && plain != nullptr) {
      misfits_.push_back(concatenate(quoted(weight), " is ", dtype_name(plain->dtype),
                                     " there, but in 4 bits in the model; load the weights first, "
                                     "pacer::modules::quantize the model after"));
    } else if (!layer->nf4() && codes != nullptr) {
      misfits_.push_back(
          concatenate(quoted(weight),
                      " is in 4 bits there, but not in the model; pacer::modules::quantize the "
                      "model first"));
    } else if (layer->nf4()) {
      size_t found = 0;
      for (const auto& buffer : layer->nf4()->named_buffers()) {
        found += in_files.count(weight + "." + buffer.key());
      }
      if (found == 0 || found == layer->nf4()->named_buffers().size()) continue;
      misfits_.push_back(concatenate("of ", quoted(weight), ", which is in 4 bits in the model, it has ",
                                     found, " of ", layer->nf4()->named_buffers().size(), " parts"));
    } else {
      continue;
    }
    file_names_.insert(weight);
    for (const std::string& part : names_under(in_files, weight)) file_names_.insert(part);
    claim_model(layer);
  }
}

// The layer's weight, under all names that the layer has, is not compared by name.
void QuantizedWeights::claim_model(modules::LinearImpl* layer) {
  for (const auto& [alias, other] : linears_) {
    if (other != layer) continue;
    const std::string weight = weight_name(alias);
    weights_.insert(weight);
    model_names_.insert(weight);
    if (!layer->nf4()) continue;
    for (const auto& buffer : layer->nf4()->named_buffers()) model_names_.insert(weight + "." + buffer.key());
  }
}

at::Device QuantizedWeights::place_of(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? at::Device(at::kCPU) : found->second;
}

void QuantizedWeights::build(const NamedTensors& values) {
  const at::NoGradGuard no_grad;
  for (auto& [name, found] : layers_) {
    const std::string weight = weight_name(name);
    const auto value = [&](const std::string& part) { return require_tensor(values, weight + "." + part); };
    const at::Tensor text = value(kNf4QuantState).contiguous();
    const QuantState state = parse_quant_state(
        std::string(reinterpret_cast<const char*>(text.const_data_ptr()), static_cast<size_t>(text.numel())),
        concatenate("the ", kNf4QuantState, " of ", quoted(weight)));
    const int64_t out = found.layer->options.out_features(), in = found.layer->options.in_features();
    require(state.shape == std::vector<int64_t>{out, in}, quoted(weight), " is a matrix of ",
            sizes_text(state.shape), " by its quant_state, but of [", out, ", ", in, "] in the model");
    require(state.nested == found.nested, quoted(weight), " has scales ",
            found.nested ? "in 8 bits" : "in fp32", ", but its quant_state is of the other kind");
    const at::Tensor map = value("quant_map").contiguous();
    // The bits have to be the same. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
    const bool is_nf4 = std::memcmp(map.const_data_ptr(), kernels::kNf4Book, sizeof kernels::kNf4Book) == 0;
    require(is_nf4, quoted(weight + ".quant_map"),
            " is not the 16 values of NF4, so that its codes mean something else");
    std::vector<const char*> scales = {"absmax"};
    if (found.nested) scales = {"nested_absmax", "nested_quant_map"};
    for (const char* part : scales) {
      require(is_finite(value(part)), quoted(weight + "." + part), " has values that are not finite");
    }
    modules::Nf4Weight built(out, in, state.dtype, found.nested);
    const auto take = [&](at::Tensor& own, const at::Tensor& tensor) {
      require(own.sizes() == tensor.sizes() && own.scalar_type() == tensor.scalar_type(), quoted(weight),
              " is not what it was a moment ago; nobody may write to the file while it is read");
      own.set_data(tensor);
    };
    take(built->codes, require_tensor(values, weight));
    take(built->absmax, value("absmax"));
    if (found.nested) {
      take(built->nested_absmax, value("nested_absmax"));
      take(built->nested_quant_map, value("nested_quant_map"));
      take(built->nested_offset, at::scalar_tensor(state.offset, built->codes.options().dtype(at::kFloat)));
    }
    found.weight = std::move(built);
  }
}

void QuantizedWeights::put_in_force() {
  for (auto& [name, found] : layers_) found.layer->set_nf4(std::move(found.weight));
}

}  // namespace pacer::detail
