#include <pacer/modules/script_module.h>

#include <utility>

#include <torch/csrc/jit/api/module.h>

#include <pacer/core/error.h>

namespace pacer::modules {

ScriptModule::ScriptModule(const torch::jit::Module& module)
    : torch::nn::Module(module.type()->name() ? module.type()->name()->name() : "ScriptModule"),
      module_(std::make_unique<torch::jit::Module>(module)) {
  torch::nn::Module::train(module.is_training());  // of itself, as it has no children yet
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    register_parameter(parameter.name, parameter.value, parameter.value.requires_grad());
  }
  for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
    if (buffer.value.defined()) register_buffer(buffer.name, buffer.value);
  }
  for (const auto& child : module.named_children()) {
    children_.push_back(register_module(child.name, std::make_shared<ScriptModule>(child.value)));
  }
}

ScriptModule::~ScriptModule() = default;

c10::IValue ScriptModule::run(std::vector<c10::IValue> inputs, const std::string& method) {
  const auto found = module_->find_method(method);
  require(found.has_value(), "the TorchScript module ", name(), " has no method ", method);
  c10::IValue output = (*found)(std::move(inputs));
  const at::NoGradGuard no_grad;
  std::vector<Assigned> assigned;
  find_assigned(method, assigned);
  for (const Assigned& each : assigned) each.owner->take_over(each);
  return output;
}

at::Tensor ScriptModule::tensor_of(const c10::IValue& output) {
  require(output.isTensor(), "forward of the TorchScript module returns ", output.tagKind(),
          " and no tensor; call run({...}) and take it apart");
  return output.toTensor();
}

// A method may assign to a buffer, as in self.count = self.count + 1. All of them are found, and their values copied, before one
// is taken over: they may be each other's, or memory of the program's own.
void ScriptModule::find_assigned(const std::string& method, std::vector<Assigned>& assigned) {
  for (const auto& parameter : module_->named_parameters(/*recurse=*/false)) {
    require(parameter.value.is_same(parameters_[parameter.name]), "after ", method, ", parameter ",
            parameter.name, " of the TorchScript module ", name(),
            " is another tensor here than there; change its values in place, or make a new script_module");
  }
  const auto known = named_buffers(/*recurse=*/false);
  for (const auto& buffer : module_->named_buffers(/*recurse=*/false)) {
    const bool is_known = known.contains(buffer.name);
    if (!buffer.value.defined() || (is_known && buffer.value.is_same(known[buffer.name]))) continue;
    assigned.push_back({this, buffer.name, buffer.value.detach().clone()});
  }
  for (const auto& child : children_) child->find_assigned(method, assigned);
}

// What is registered here stays the tensor that hooks and checkpoints know, and has the new value.
void ScriptModule::take_over(const Assigned& buffer) {
  const auto known = named_buffers(/*recurse=*/false);
  if (!known.contains(buffer.name)) {
    module_->setattr(buffer.name, register_buffer(buffer.name, buffer.value));
    return;
  }
  const at::Tensor& registered = known[buffer.name];
  const bool has_its_form =
      registered.sizes() == buffer.value.sizes() && registered.options().type_equal(buffer.value.options());
  if (has_its_form) {
    registered.copy_(buffer.value);
  } else {
    registered.set_data(buffer.value);
    registered.unsafeGetTensorImpl()->bump_version();  // a graph that has kept it notices
  }
  module_->setattr(buffer.name, registered);
}

void ScriptModule::train(bool on) {
  torch::nn::Module::train(on);
  if (module_->hasattr("training")) module_->setattr("training", on);
}

void ScriptModule::pretty_print(std::ostream& stream) const {
  stream << "pacer::modules::ScriptModule " << name();
}

std::shared_ptr<ScriptModule> script_module(const torch::jit::Module& module) {
  auto made = std::make_shared<ScriptModule>(module);
  require(!made->parameters().empty(), "the TorchScript module ", made->name(),
          " has no parameters, so there is nothing to train; torch.jit.freeze makes constants of them");
  return made;
}

}  // namespace pacer::modules
