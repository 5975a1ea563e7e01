// The model as a pipeline of all ranks, each with a part of the blocks: what a step and a validation are
// then. Every rank gets the whole batch, which goes through the stages in micro-batches, so that step, tokens
// and loss are those of the arms whose ranks share a batch out.
#pragma once

#include <memory>
#include <vector>

#include <pacer/parallel/pipeline.h>

#include "convergence/settings.h"
#include "convergence/text/text_batches.h"
#include "gpt.h"

namespace convergence {

class PipedGpt {
 public:
  // Moves this rank's stage to its device. `validation`: what validation_loss will be given. Throws
  // pacer::InvalidArgument where there are fewer layers than ranks.
  PipedGpt(const Gpt& model, const Settings& settings, const std::vector<ByteBatch>& validation,
           const std::shared_ptr<pacer::Communicator>& world);

  const pacer::Pipeline& pipeline() const { return pipeline_; }
  void step(pacer::Session& session, const ByteBatch& batch);
  // The mean loss over all sequences, the same on every rank; inside Session::evaluate.
  double validation_loss(const std::vector<ByteBatch>& batches);

 private:
  Gpt model_;
  pacer::Pipeline pipeline_;
};

}  // namespace convergence
