// What stages of a pipeline send each other: activations to the next stage, gradients to the one before. Each
// direction of each pair of ranks has a queue of its own, so that no rank waits for a message behind another
// one that nobody takes yet.
//
// A rank asks for a message when it needs it, no earlier: on a GPU the kernel that waits for one takes
// multiprocessors from those that compute.
//
// Receivers must know shapes. They are told when a micro-batch of a new kind passes for the first time, and
// remembered: micro-batches of one kind give tensors of the same shapes, dtypes and need of a gradient in every stage.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/modules/tensor_call.h>
#include <pacer/parallel/pipeline_plan.h>

namespace pacer::detail {

// What a receiver knows of a tensor before it comes.
struct TensorSpec {
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  bool requires_grad = false;

  bool operator==(const TensorSpec& other) const {
    return dtype == other.dtype && sizes == other.sizes && requires_grad == other.requires_grad;
  }
};
using TensorSpecs = std::vector<TensorSpec>;
TensorSpecs specs_of(const Tensors& tensors);

class StageMessages {
 public:
  enum class Direction { activations, gradients };
  // How many queues a direction needs, and which of them that rank sends on: none that it receives on.
  static int queues(const PipelineSchedule& schedule);
  static int queue_of(Direction direction, int sender, const PipelineSchedule& schedule);

  // Makes the queues: all ranks of the pipeline together.
  StageMessages(std::shared_ptr<Communicator> pipeline, const PipelineSchedule& schedule);

  // The number on this rank of the micro-batch's kind: the dtypes and shapes of its tensors, and whether gradients are
  // switched on. The ranks of a pipeline have the same micro-batches.
  size_t kind_of(const Tensors& micro_batch);

  // ---- Activations, from a stage to the next. Both give the micro-batch's kind. ----

  void send_activations(int64_t from_stage, size_t kind, const Tensors& tensors);
  // Leaves that require a gradient where the sender's tensors did.
  Tensors take_activations(int64_t to_stage, size_t kind);

  // ---- Gradients, from a stage to the one before, of the activations that require them. ----

  void send_gradients(int64_t from_stage, const Tensors& gradients);
  Tensors take_gradients(int64_t to_stage, const TensorSpecs& of);

  // Lets go of what has been sent; waits where asked to.
  void collect(bool wait);
  // Forgets what is under way, after an error.
  void drop();

 private:
  struct Incoming {
    Tensors tensors;
    Work work;
  };
  struct Outgoing {
    Work work;
    Tensors tensors;
  };

  int rank_of(int64_t stage) const { return static_cast<int>(stage % schedule_.ranks); }
  Communicator& queue(Direction direction, int sender) const {
    return *queues_[static_cast<size_t>(direction)]
                   [static_cast<size_t>(queue_of(direction, sender, schedule_))];
  }
  void send(Direction direction, int64_t from, int64_t to, Tensors tensors);
  Incoming receive(Direction direction, int64_t from, const TensorSpecs& specs);
  Incoming take(Direction direction, int64_t from, int64_t to, const TensorSpecs& specs);
  TensorSpecs receive_specs(int64_t from);

  const std::shared_ptr<Communicator> pipeline_;
  const PipelineSchedule schedule_;
  std::vector<std::shared_ptr<Communicator>> queues_[2];  // by direction
  std::vector<TensorSpecs> kinds_;  // of micro-batches; all tensors of one require gradients, or none does
  std::map<std::pair<int64_t, size_t>, TensorSpecs> received_specs_;  // by stage that receives, and kind
  std::map<std::pair<int64_t, size_t>, TensorSpecs> sent_specs_;      // by stage that sends, and kind
  std::map<std::pair<Direction, int64_t>, std::deque<Tensors>> to_this_rank_;  // where both stages are here
  std::deque<Outgoing> sent_;
};

}  // namespace pacer::detail
