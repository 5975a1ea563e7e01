#include <pacer/hooks/detail/model_facts.h>

#include <algorithm>
#include <map>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ops/cat.h>
#include <c10/util/Type.h>
#include <torch/nn/module.h>

#include <pacer/collectives/detail/tensor_text.h>
#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/detail/torch_optimizer_state.h>
#include <pacer/modules/detail/model_modules.h>
#include <pacer/optimizers/detail/optimizer_traits.h>
#include <pacer/optimizers/detail/option_numbers.h>
#include <pacer/optimizers/own_rule.h>

namespace pacer::detail {
namespace {

constexpr int64_t kMessageBytes = int64_t{64} << 20;

std::vector<RegisteredParameter> registered(const SessionParts& parts) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& item : parts.model().named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  std::vector<RegisteredParameter> all;
  const auto& groups = parts.optimizer().param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    for (size_t i = 0; i < groups[g].params().size(); ++i) {
      const at::Tensor& parameter = groups[g].params()[i];
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      const std::string place = concatenate(g, ".", i);
      std::string name = found != names.end() ? found->second : place;
      if (parts.session_optimizer()) {
        const std::string own = parts.session_optimizer()->parameter_name(parameter);
        if (own != place) name = own;
      }
      if (found == names.end() && name == place) {
        name = concatenate(i, " of group ", g, " (shape ", parameter.sizes(), ", not the model's)");
      }
      all.push_back({parameter, g, i, std::move(name)});
    }
  }
  return all;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> named_optimizer_parameters(const SessionParts& parts) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (RegisteredParameter& parameter : registered(parts)) {
    named.emplace_back(std::move(parameter.name), std::move(parameter.tensor));
  }
  return named;
}

std::vector<std::pair<std::string, at::Tensor>> named_in_model_order(const SessionParts& parts) {
  std::unordered_map<const void*, size_t> places;
  for (const at::Tensor& parameter : parts.model().parameters())
    places.emplace(parameter.unsafeGetTensorImpl(), places.size());
  const auto place_of = [&](const auto& named) {
    const auto found = places.find(named.second.unsafeGetTensorImpl());
    return found == places.end() ? places.size() : found->second;
  };
  auto named = named_optimizer_parameters(parts);
  std::stable_sort(named.begin(), named.end(),
                   [&](const auto& a, const auto& b) { return place_of(a) < place_of(b); });
  return named;
}

std::vector<at::Tensor> all_optimizer_parameters(const SessionParts& parts) {
  std::vector<at::Tensor> all;
  for (const auto& group : parts.optimizer().param_groups()) {
    all.insert(all.end(), group.params().begin(), group.params().end());
  }
  return all;
}

std::vector<at::Tensor> trained_parameters(const SessionParts& parts) {
  return trained_parameters(parts.optimizer().param_groups());
}

std::vector<double> learning_rates(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  rates.reserve(optimizer.param_groups().size());
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

std::vector<Fact> parameter_facts(const SessionParts& parts) { return parameter_facts(registered(parts)); }

std::vector<Fact> other_facts(const SessionParts& parts, bool with_buffers) {
  std::vector<Fact> facts;
  std::unordered_set<const void*> known;
  for (const at::Tensor& parameter : all_optimizer_parameters(parts)) {
    known.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& item : parts.model().named_parameters()) {
    if (known.count(item.value().unsafeGetTensorImpl()) != 0) continue;
    facts.push_back({"parameter beside the optimizer's " + item.key(), tensor_text(item.value())});
  }
  const auto codes = nf4_buffers(parts.model());
  for (const auto& item : parts.model().named_buffers()) {
    const bool is_weight = codes.count(item.value().unsafeGetTensorImpl()) != 0;
    if (is_weight || with_buffers) {
      facts.push_back({(is_weight ? "4-bit weight " : "buffer ") + item.key(), tensor_text(item.value())});
    }
  }
  return facts;
}

namespace {

// Each step does this, so the traits of one group are tried for the next before they are looked for.
void visit_numbers(const torch::optim::Optimizer& optimizer, NumberVisitor& visit) {
  const OptimizerTraits* traits = nullptr;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const torch::optim::OptimizerOptions& options = optimizer.param_groups()[g].options();
    visit.begin_group(g);
    if (traits == nullptr || !traits->owns(options)) traits = find_traits(options);
    if (traits != nullptr) {
      traits->visit_numbers(options, visit);
    } else if (!visit_numbers(options, visit)) {
      visit("lr", options.get_lr());
    }
  }
}

}  // namespace

std::vector<Fact> optimizer_facts(const torch::optim::Optimizer& optimizer) {
  std::vector<Fact> facts = {{"optimizer", c10::demangle(typeid(optimizer).name())},
                             {"parameter groups", std::to_string(optimizer.param_groups().size())}};
  for (const auto& group : optimizer.param_groups()) {  // one type of optimizer has all rules
    const auto* own = dynamic_cast<const OwnRuleOptions*>(&group.options());
    if (own != nullptr) facts.push_back({"update rule", own->rule().name()});
  }
  NumberFacts numbers;
  visit_numbers(optimizer, numbers);
  for (Fact& fact : std::move(numbers).facts()) facts.push_back(std::move(fact));
  return facts;
}

std::string checksum_of_numbers(const torch::optim::Optimizer& optimizer) {
  NumberBytes numbers;
  visit_numbers(optimizer, numbers);
  return checksum_of(numbers.bytes());
}

void broadcast_all(Communicator& world, const std::vector<at::Tensor>& tensors) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue;
    }
    by_dtype[tensor.scalar_type()].push_back(tensor.detach());
  }
  for (const auto& [dtype, list] : by_dtype) {
    for (size_t begin = 0, end = 0; begin < list.size(); begin = end) {
      std::vector<at::Tensor> flat;
      int64_t bytes = 0;
      for (; end < list.size() && (bytes == 0 || bytes < kMessageBytes); ++end) {
        const at::Tensor dense = list[end].resolve_conj().resolve_neg().to(world.device()).contiguous();
        flat.push_back(dense.view({-1}).view(at::kByte));
        bytes += flat.back().numel();
      }
      const at::Tensor message = at::cat(flat);
      world.broadcast(message, 0, CollectiveOptions().agreed(true)).wait();
      int64_t offset = 0;
      for (size_t i = begin; i < end; ++i) {
        at::Tensor target = list[i];
        const int64_t length = flat[i - begin].numel();
        if (world.rank() != 0) {
          target.copy_(message.narrow(0, offset, length).view(target.scalar_type()).view(target.sizes()));
        }
        offset += length;
      }
    }
  }
}

}  // namespace pacer::detail
