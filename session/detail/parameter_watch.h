// What a Session notices where the parameters of its model and of its optimizer are not the same.
#pragma once

#include <memory>
#include <vector>

#include <pacer/hooks/session_parts.h>
#include <pacer/optimizers/detail/parameter_list.h>

namespace pacer::detail {

// Throws InvalidArgument where the optimizer trains nothing of the model; warns where it leaves out
// parameters of the model that need a gradient, or has parameters that are not the model's.
void check_parameters(const SessionParts& parts);

// Notices where parameters are frozen or unfrozen between steps, as by set_adapter() and quantize(), and
// where model or optimizer have got other ones. It keeps a model alive that a shared_ptr, or a holder, has,
// which may be given another model while the Session still has this one.
class ParameterWatch {
 public:
  explicit ParameterWatch(const SessionParts& parts);
  // Call it before the first step.
  void remember(const SessionParts& parts);
  // Call it before each pass. Where something changed: throws InvalidArgument for a weight that was put in 4
  // bits and for a parameter that was replaced in the model alone, or in the optimizer alone, and goes on
  // doing so; warns of what is new among what check_parameters warns of.
  void check(const SessionParts& parts);

 private:
  struct Change;
  bool is_as_seen(const SessionParts& parts) const;
  Change change(const SessionParts& parts) const;

  const std::shared_ptr<torch::nn::Module> model_;      // null where no shared_ptr has it
  std::vector<SeenParameter> of_optimizer_, of_model_;  // in the order of groups, and of modules
};

}  // namespace pacer::detail
