#include <pacer/checkpoints/detail/causal_lm_adapter.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include <pacer/checkpoints/detail/causal_lm_names.h>
#include <pacer/checkpoints/detail/linear_names.h>
#include <pacer/core/error.h>
#include <pacer/files/json_scanner.h>

namespace pacer::detail {
namespace {

// Nothing for another model.
std::vector<CausalLmName> names_of(torch::nn::Module& model) {
  const auto* lm = model.as<modules::CausalLmImpl>();
  return lm == nullptr ? std::vector<CausalLmName>() : causal_lm_names(lm->options);
}

// The parts of a layer that a folder has adapters of.
struct Members {
  std::string own;
  int64_t rows = 0;  // of the whole layer
  std::vector<CausalLmName> found;
};

std::vector<Members> members_of(const std::vector<CausalLmName>& names, const AdapterFolder& folder) {
  std::vector<Members> all;
  for (const CausalLmName& name : names) {
    if (all.empty() || all.back().own != name.own) all.push_back({name.own, 0, {}});
    all.back().rows += name.count;
    if (folder.layers.count(name.theirs) > 0) all.back().found.push_back(name);
  }
  const auto has_none = [](const Members& members) { return members.found.empty(); };
  all.erase(std::remove_if(all.begin(), all.end(), has_none), all.end());
  return all;
}

double scale_of(const AdapterConfig& config, const std::string& layer) {
  const auto r = static_cast<double>(rank_of(config, layer));
  return alpha_of(config, layer) / (config.rslora ? std::sqrt(r) : r);
}

// By what the header of the file says.
void check_members(const Members& members, const AdapterFolder& folder) {
  const std::string& first = members.found.front().theirs;
  const std::vector<int64_t>& first_a = *folder.layers.at(first).a;
  for (const CausalLmName& member : members.found) {
    const std::vector<int64_t>&a = *folder.layers.at(member.theirs).a,
          &b = *folder.layers.at(member.theirs).b;
    const int64_t r = rank_of(folder.config, member.theirs);
    require(a.size() == 2 && b.size() == 2 && first_a.size() == 2 && a[0] == r && b[1] == r &&
                a[1] == first_a[1] && (member.count == 0 || b[0] == member.count),
            folder.path, " has matrices of ", at::IntArrayRef(a), " and ", at::IntArrayRef(b), " for \"",
            member.theirs, "\", where r is ", r,
            member.count == 0
                ? std::string()
                : concatenate(", the layer has ", member.count, " rows in \"", members.own, '"'),
            ", and all adapters in \"", members.own, "\" have as many columns");
    require(scale_of(folder.config, member.theirs) == scale_of(folder.config, first), folder.path,
            ": the adapters of \"", first, "\" and \"", member.theirs,
            "\" are scaled differently by their alpha and r, but are parts of one layer in a CausalLm, \"",
            members.own, "\", whose adapter has one scale");
  }
  require(folder.layers.count(members.own) == 0, folder.path, " has adapters of \"", members.own,
          "\" and of \"", first, "\", which are one layer in the model");
}

// What the matrices of a layer make as one adapter.
struct Joined {
  at::Tensor a, b;
  double alpha;
  at::Tensor magnitude;  // with LoraOptions::dora
};

// Those of the rows of all members, which are all rows of the layer.
at::Tensor joined_magnitudes(const Members& members, const AdapterFolder& folder,
                             const NamedTensors& values) {
  if (!folder.config.dora) return {};
  std::vector<at::Tensor> all;
  int64_t rows = 0;
  for (const CausalLmName& member : members.found) {
    all.push_back(magnitude_of(values, member.theirs));
    if (all.back().sizes() == at::IntArrayRef(member.count)) rows += member.count;
  }
  require(rows == members.rows, folder.path, " does not have lora_magnitude_vector of exactly all rows of \"",
          members.own, "\", which is one layer in a CausalLm; train DoRA of all of its parts together");
  return at::cat(all);
}

Joined joined(const Members& members, const AdapterFolder& folder, const NamedTensors& values) {
  const std::string& first = members.found.front().theirs;
  const at::Tensor& first_a = matrix_of(values, first, true);
  if (members.rows == 0)
    return {first_a, matrix_of(values, first, false), alpha_of(folder.config, first),
            joined_magnitudes(members, folder, values)};
  std::vector<at::Tensor> all_a;
  for (const CausalLmName& member : members.found) all_a.push_back(matrix_of(values, member.theirs, true));
  const bool have_one_a =
      std::all_of(all_a.begin(), all_a.end(), [&](const at::Tensor& a) { return a.equal(first_a); });
  const at::Tensor a = have_one_a ? first_a : at::cat(all_a);
  const at::Tensor b = at::zeros({members.rows, a.size(0)}, a.options());
  int64_t column = 0;
  for (const CausalLmName& member : members.found) {
    const at::Tensor& part = matrix_of(values, member.theirs, false);
    b.narrow(0, member.first, member.count).narrow(1, column, part.size(1)).copy_(part);
    if (!have_one_a) column += part.size(1);
  }
  const auto rank = static_cast<double>(a.size(0));
  return {a, b,
          have_one_a ? alpha_of(folder.config, first)
                     : scale_of(folder.config, first) * (folder.config.rslora ? std::sqrt(rank) : rank),
          joined_magnitudes(members, folder, values)};
}

}  // namespace

std::map<std::string, LayerInFile> layers_in_file(torch::nn::Module& model,
                                                  const std::map<std::string, modules::LoraAdapter>& layers) {
  std::map<std::string, LayerInFile> in_file;
  for (const auto& [name, adapter] : layers) in_file.insert({name, {adapter, 0, adapter->B.size(0)}});
  for (const CausalLmName& name : names_of(model)) {
    const auto found = layers.find(name.own);
    if (found == layers.end()) continue;
    const modules::LoraAdapter& adapter = found->second;
    in_file.erase(name.own);
    in_file.insert({name.theirs, {adapter, name.first, name.count == 0 ? adapter->B.size(0) : name.count}});
  }
  return in_file;
}

void name_as_in_file(torch::nn::Module& model, AdapterModules& beside) {
  const auto* lm = model.as<modules::CausalLmImpl>();
  for (const CausalLmName& name : names_of(model)) {
    const auto module = std::find(beside.names.begin(), beside.names.end(), name.own);
    if (module == beside.names.end()) continue;
    require(name.own != "embedding" || !lm->options.tied(), "save_adapter: \"", name.own,
            "\" is trained beside the adapter and is the head, too, of which PEFT's files would make two; "
            "freeze it, or keep the model by save_causal_lm");
    *module = name.theirs;
    NamedTensors renamed;
    for (const auto& [tensor_name, tensor] : beside.tensors) {
      const bool is_part = tensor_name.compare(0, name.own.size() + 1, name.own + '.') == 0;
      renamed.emplace(is_part ? name.theirs + tensor_name.substr(name.own.size()) : tensor_name, tensor);
    }
    beside.tensors = std::move(renamed);
  }
  std::sort(beside.names.begin(), beside.names.end());
}

bool join_layers(torch::nn::Module& model, AdapterFolder& folder, NamedTensors& values) {
  const std::vector<CausalLmName> names = names_of(model);
  const std::vector<Members> all = members_of(names, folder);
  if (all.empty()) return false;
  const std::map<std::string, modules::LinearImpl*> linears = linear_names(model);
  for (const auto& item : folder.layers) {
    const std::string& layer = item.first;
    require_both(folder, layer, item.second);
    const auto is_layer = [&](const CausalLmName& name) { return name.theirs == layer; };
    require(linears.count(layer) > 0 || std::any_of(names.begin(), names.end(), is_layer), folder.path,
            " has an adapter of ", quote_for_message(layer), ", which is no layer of this CausalLm");
  }
  for (const Members& members : all) check_members(members, folder);
  values = read_adapter_tensors(folder);
  AdapterFolder as_here = folder;
  for (const Members& members : all) {
    const auto [a, b, alpha, magnitude] = joined(members, folder, values);
    for (const CausalLmName& member : members.found) {
      as_here.layers.erase(member.theirs);
      for (const std::string_view suffix : {kAdapterA, kAdapterB, kMagnitude}) {
        values.erase(name_in_file(member.theirs, suffix));
      }
    }
    AdapterFolder::Matrices& shapes = as_here.layers[members.own];
    shapes.a = a.sizes().vec();
    shapes.b = b.sizes().vec();
    if (magnitude.defined()) {
      shapes.magnitude = magnitude.sizes().vec();
      values[name_in_file(members.own, kMagnitude)] = magnitude;
    }
    values[name_in_file(members.own, kAdapterA)] = a;
    values[name_in_file(members.own, kAdapterB)] = b;
    as_here.config.rank_pattern.insert(as_here.config.rank_pattern.begin(), {members.own, a.size(0)});
    as_here.config.alpha_pattern.insert(as_here.config.alpha_pattern.begin(), {members.own, alpha});
  }
  for (const CausalLmName& name : names) {
    const std::string begin = name.theirs + '.';
    for (const auto& [tensor_name, tensor] : folder.beside) {
      if (name.count > 0 || tensor_name.compare(0, begin.size(), begin) != 0) continue;
      const std::string own = name.own + tensor_name.substr(name.theirs.size());
      as_here.beside.erase(tensor_name);
      as_here.beside.emplace(own, tensor);
      const auto value = values.find(name_in_file(tensor_name, ""));
      values[name_in_file(own, "")] = value->second;
      values.erase(value);
    }
  }
  folder = std::move(as_here);
  return true;
}

}  // namespace pacer::detail
