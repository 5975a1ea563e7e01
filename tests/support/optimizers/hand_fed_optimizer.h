// An optimizer by itself over a few parameters, its gradients a function of rank and step.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/samples.h"
#include "support/session/registry.h"

namespace pacer::testing {

class HandFedOptimizer {
 public:
  HandFedOptimizer(const RegisteredOptimizer& entry, const std::shared_ptr<Communicator>& ranks)
      : world(ranks),
        named_(named_parameters(at::TensorOptions(ranks->device()).dtype(entry.dtype))),
        optimizer(entry.make(named_, world)) {}

  void set_gradients() {
    uint64_t seed = static_cast<uint64_t>(100 * (steps + 1) + 10 * world->rank());
    for (const auto& item : named_) {
      const Tensor& parameter = item.value();
      parameter.mutable_grad() = numbers(++seed, parameter.sizes().vec(), parameter.options());
    }
  }
  void step() {
    set_gradients();
    optimizer->step();
    ++steps;
  }
  void step_until(int64_t end) {
    while (steps < end) step();
  }

  // Copies of the parameters and of all of the state, but for the state of parameters that took no step:
  // zeros, or not there at all. Throws where a step failed half-way.
  NamedTensors state() const {
    auto& own = dynamic_cast<SessionOptimizer&>(*optimizer);
    NamedTensors all;
    for (const auto& item : named_) all["value of " + item.key()] = item.value().detach().clone();
    const NamedTensors exported = own.export_state();
    for (const auto& [name, tensor] : exported) {
      const auto steps_of = exported.find(name.substr(0, name.rfind('/')) + "/step");
      if (steps_of != exported.end() && steps_of->second.item<int64_t>() == 0) continue;
      all[name] = tensor.detach().clone();
    }
    for (const auto& [name, tensor] : own.export_rank_state())
      all["rank's " + name] = tensor.detach().clone();
    return all;
  }

  std::shared_ptr<Communicator> world;

 private:
  static NamedParameters named_parameters(const at::TensorOptions& kind) {
    NamedParameters named;
    uint64_t seed = 0;
    for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
             {"encoder.weight", {6, 8}}, {"encoder.bias", {5}}, {"head.weight", {9, 4}}}) {
      named.insert(name, numbers(++seed, sizes, kind).requires_grad_());
    }
    return named;
  }
  static Tensor numbers(uint64_t seed, const std::vector<int64_t>& sizes, const at::TensorOptions& kind) {
    Samples samples(seed);
    const Tensor values = at::empty(sizes, at::kFloat);
    auto* value = values.mutable_data_ptr<float>();
    for (int64_t i = 0; i < values.numel(); ++i) value[i] = static_cast<float>(samples.uniform() - 0.5);
    return values.to(kind.device(), kind.dtype().toScalarType());
  }

  NamedParameters named_;

 public:
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  int64_t steps = 0;
};

}  // namespace pacer::testing
