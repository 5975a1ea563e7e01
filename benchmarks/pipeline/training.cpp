#include "training.h"

#include <algorithm>
#include <optional>

#include <torch/csrc/autograd/autograd.h>

#include <pacer/pacer.h>

#include "moments.h"
#include "support/device.h"

namespace bench::pipeline {
namespace {

constexpr int64_t kOwnRepetitions = 3;

// All passes of one step through this rank's stages, one micro-batch after the other. What other stages would
// send is made up once, so that nothing waits for a message; gradients add up as in a step.
class OwnPasses {
 public:
  OwnPasses(const Shape& shape, const pacer::Pipeline& pipeline, Gpt model,
            const std::pair<Tensor, Tensor>& batch)
      : shape_(shape), pipeline_(pipeline), model_(std::move(model)), batch_(batch) {
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(batch.first.device());
    made_up_ = torch::randn({shape.rows, shape.gpt.length, shape.gpt.width}, options);
  }
  void run() {
    for (int64_t k = 0; k < shape_.micro_batches; ++k) {
      for (int64_t chunk = 0; chunk < pipeline_.schedule().chunks; ++chunk) pass(k, chunk);
    }
  }

 private:
  void pass(int64_t k, int64_t chunk) {
    const pacer::PipelineSchedule& schedule = pipeline_.schedule();
    const int64_t stage = schedule.stage(pipeline_.grid().stage(), chunk);
    const auto rows_of = [&](const Tensor& whole) { return whole.narrow(0, k * shape_.rows, shape_.rows); };
    pacer::Tensors inputs;
    if (stage > 0) inputs.push_back(made_up_.detach().requires_grad_());
    Tensor x = stage > 0 ? inputs.front() : model_->embed(rows_of(batch_.first));
    const auto [begin, end] = pipeline_.blocks_of(chunk);
    for (int64_t i = begin; i < end; ++i) x = model_->run_block(static_cast<size_t>(i), x);
    const bool is_last = stage == schedule.stages() - 1;
    if (is_last) x = model_->loss_behind_blocks(x, rows_of(batch_.second));
    const Tensor gradient = is_last ? at::ones_like(x) : made_up_;
    if (schedule.order == pacer::PipelineOrder::zero_bubble) {
      pacer::SplitBackward halves({x}, inputs);
      x = Tensor();
      (void)halves.input_half({gradient});
      halves.weight_half();
    } else {
      torch::autograd::backward({x}, {gradient});
    }
  }

  const Shape& shape_;
  const pacer::Pipeline& pipeline_;
  Gpt model_;
  const std::pair<Tensor, Tensor>& batch_;
  Tensor made_up_;  // [rows, length, width]
};

}  // namespace

std::vector<int64_t> Cut::stages(const pacer::PipelineSchedule& schedule) const {
  if (ranks.empty()) return {};
  pacer::require(static_cast<int64_t>(ranks.size()) == schedule.ranks + 1, "--cut has ", ranks.size(),
                 " bounds, but ", schedule.ranks, " ranks need ", schedule.ranks + 1,
                 ", from 0 to the number of layers");
  std::vector<int64_t> bounds = {0};
  for (int64_t chunk = 0; chunk < schedule.chunks; ++chunk) {
    for (size_t rank = 0; rank + 1 < ranks.size(); ++rank) {
      const int64_t blocks = ranks[rank + 1] - ranks[rank];
      bounds.push_back(bounds.back() + blocks / schedule.chunks + (chunk < blocks % schedule.chunks));
    }
  }
  return bounds;
}

void measure(const Shape& shape, const pacer::PipelineSchedule& schedule, const Cut& cut,
             const pacer::Grid& grid, int64_t uncounted, int64_t steps, Measured& measured) {
  const auto& world = grid.world();
  const at::Device device = world->device();
  torch::manual_seed(0);
  Gpt model(shape.gpt, at::TensorOptions().dtype(at::kBFloat16).device(device));
  const pacer::Pipeline pipeline(*model, model->blocks, &GptBlockImpl::forward, grid, schedule,
                                 pacer::PipelineOptions()
                                     .first({"tokens", "positions"})
                                     .last({"norm", "head"})
                                     .cut(cut.stages(schedule)));
  if (device.is_cuda()) start_memory_peaks(device);
  torch::manual_seed(1);  // the same batch on every rank
  const auto batch = draw_batch(shape.gpt, shape.micro_batches * shape.rows, device);
  pacer::FusedAdamW optimizer(pipeline.named_parameters(), pacer::FusedAdamWOptions(1e-4));
  pacer::Session session(*model, optimizer, world);
  session.use(pipeline);
  const auto first = [&](const Tensor& ids) { return model->embed(ids); };
  const auto last = [&](const Tensor& x, const Tensor& targets) {
    return model->loss_behind_blocks(x, targets);
  };
  Tensor first_loss, last_loss;
  for (int64_t step = 0; step < uncounted + steps; ++step) {
    world->barrier();
    Moments moments(device);
    const double milliseconds = milliseconds_of(device, [&] {
      moments.mark();
      last_loss = pipeline.step(session, batch.first, batch.second, first, last);
      moments.mark();
      session.step();
      moments.mark();
    });
    if (step == 0) first_loss = last_loss;
    if (step < uncounted) continue;
    measured.steps.push_back(milliseconds);
    measured.passes.push_back(moments.milliseconds(0, 1));
    measured.optimizer.push_back(moments.milliseconds(1, 2));
  }
  if (device.is_cuda()) {
    const auto peaks = memory_peaks(device);
    measured.allocated_GB = std::max(measured.allocated_GB, peaks.allocated);
    measured.reserved_GB = std::max(measured.reserved_GB, peaks.reserved);
  }
  measured.first_losses.push_back(first_loss.item<double>());
  measured.last_losses.push_back(last_loss.item<double>());
  measured.blocks = measured.parameters = 0;
  for (int64_t chunk = 0; chunk < schedule.chunks; ++chunk) {
    const auto [begin, end] = pipeline.blocks_of(chunk);
    measured.blocks += end - begin;
  }
  for (const auto& item : pipeline.named_parameters()) measured.parameters += item.value().numel();

  OwnPasses own(shape, pipeline, model, batch);
  world->barrier();
  for (int64_t repetition = 0; repetition < kOwnRepetitions; ++repetition) {
    measured.own.push_back(milliseconds_of(device, [&] { own.run(); }));
    optimizer.zero_grad();
  }
  session.finish();
}

}  // namespace bench::pipeline
