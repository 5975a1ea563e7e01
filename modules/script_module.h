// TorchScript modules as modules of C++: a Session trains a model that Python has written into a file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

namespace torch::jit {
struct Module;
}  // namespace torch::jit

namespace pacer::modules {

// Has the modules, parameters and buffers of a TorchScript module under their names: the same tensors, not copies. What
// trains, moves or loads the one does so to the other, and torch::jit::Module::save writes what was trained.
class ScriptModule : public torch::nn::Module {
 public:
  explicit ScriptModule(const torch::jit::Module& module);
  ~ScriptModule() override;

  // What a method returns. Throws InvalidArgument where there is none of that name, and where it has put another tensor into a
  // parameter's place; what TorchScript throws comes as it is. Buffers may be given other tensors.
  c10::IValue run(std::vector<c10::IValue> inputs, const std::string& method = "forward");
  // forward for tensors. Throws InvalidArgument where it returns anything but a tensor; then call run.
  template <class... Tensors>
  at::Tensor forward(const Tensors&... inputs) {
    return tensor_of(run({c10::IValue(inputs)...}));
  }

  void train(bool on = true) override;
  void pretty_print(std::ostream& stream) const override;

 private:
  static at::Tensor tensor_of(const c10::IValue& output);
  struct Assigned {
    ScriptModule* owner;
    std::string name;
    at::Tensor value;
  };
  void find_assigned(const std::string& method, std::vector<Assigned>& assigned);
  void take_over(const Assigned& buffer);

  std::unique_ptr<torch::jit::Module> module_;
  std::vector<std::shared_ptr<ScriptModule>> children_;
};

// The model for a Session and an optimizer. Throws InvalidArgument for a module without parameters, as torch::jit::freeze
// makes them.
//   const auto model = pacer::modules::script_module(net);  // a torch::jit::Module
//   pacer::FusedAdamW optimizer(model->named_parameters());
//   pacer::Session session(model, optimizer);
std::shared_ptr<ScriptModule> script_module(const torch::jit::Module& module);

}  // namespace pacer::modules
