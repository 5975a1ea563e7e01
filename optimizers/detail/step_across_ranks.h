// What step() of an optimizer that knows of other ranks does before it, where no Session has: it compares what ranks
// are about to do, and adds over them the gradients that have to be added.
#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include <pacer/collectives/communicator.h>
#include <pacer/optimizers/detail/optimizer_view.h>
#include <pacer/optimizers/detail/step_agreement.h>
#include <pacer/optimizers/session_optimizer.h>

namespace pacer {
class GradientBucketer;
}

namespace pacer::detail {

class StepAcrossRanks {
 public:
  explicit StepAcrossRanks(std::shared_ptr<Communicator> world);
  ~StepAcrossRanks();

  // What prepare() is to be told. A parameter without a gradient on any rank has none afterwards, and so sits
  // the step out as with a single rank; one that only some ranks have a gradient of counts as zero on the
  // others. `local` and `scope` as SessionOptimizer has them; `attempts` counts steps.
  StepInputs inputs(const OptimizerView& optimizer, int64_t attempts, const std::vector<at::Tensor>& local,
                    GradientScope scope);
  // Which parameters may stay local is to be another question from now on.
  void forget() { reduced_.clear(); }

 private:
  double add_gradients(const OptimizerView& optimizer, const std::vector<at::Tensor>& local,
                       GradientScope scope);
  void update_bucketer(const OptimizerView& optimizer, const std::vector<at::Tensor>& local);
  void fill_missing(const std::unordered_set<const void*>& local) const;

  std::shared_ptr<Communicator> world_;
  StepAgreement agreement_;
  std::unique_ptr<GradientBucketer> bucketer_;
  std::vector<at::Tensor> reduced_;  // what the bucketer was made for
};

}  // namespace pacer::detail
