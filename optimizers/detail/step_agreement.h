// What ranks that step an optimizer without a Session compare before each step: parameters, all numbers of
// their groups, and which parameters have a gradient. One small message while all agree. Values of parameters
// are compared before their first step.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pacer/collectives/agreement.h>
#include <pacer/optimizers/detail/parameter_list.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer::detail {

// The Communicator of an optimizer that was given none. Throws InvalidArgument in a process that is one of
// several, where each would train a model of its own.
std::shared_ptr<Communicator> alone(const char* optimizer, at::Device device);

// Throws InvalidArgument where a Session joins other ranks than the optimizer was given.
void require_same_ranks(const char* optimizer, const Communicator& own, const Communicator& of_session);

// Throws InvalidArgument where parameters are on another device than that on which `ranks` are joined.
void require_joined_on(at::Device parameters, const char* optimizer, const Communicator& ranks);

class StepAgreement {
 public:
  // The parameters, in their order, that have a gradient on no rank. Throws CommunicationError, on every rank
  // and with the first difference, where ranks differ; the next step compares again. `step` counts attempts.
  std::vector<at::Tensor> without_gradient(Communicator& world, int64_t step, const OptimizerView& optimizer);

 private:
  struct Known {
    SeenParameter parameter;
    size_t group;
    at::ScalarType dtype;
    std::vector<int64_t> sizes, strides;
  };
  // Whether they are what the fingerprint was made of.
  bool is_known(const OptimizerView& optimizer) const;
  void remember(const OptimizerView& optimizer);
  void forget();

  std::vector<Known> parameters_;
  std::vector<Fact> facts_;   // about the parameters
  std::string fingerprint_;   // of the facts
  std::vector<Fact> values_;  // of parameters that are new, until they are compared
};

}  // namespace pacer::detail
