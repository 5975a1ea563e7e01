#include <pacer/parallel/detail/pipeline_run.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <pacer/core/error.h>
#include <pacer/files/checksum.h>
#include <pacer/hooks/detail/device_copy.h>
#include <pacer/hooks/detail/evaluation_scope.h>
#include <pacer/modules/detail/replay_ahead.h>

namespace pacer::detail {

std::vector<Tensors> PipelineRun::micro_batches(const Tensors& batch) const {
  const int64_t count = hook_.schedule().micro_batches;
  const bool may_differ = hook_.session_parts()->weight_by_tokens;
  const auto rows_of = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.dim() > 0 ? tensor.size(0) : 0;
  };
  std::vector<Tensors> all(static_cast<size_t>(count));
  for (const at::Tensor& tensor : batch) {
    const int64_t all_rows = rows_of(tensor);
    const bool is_even = all_rows % count == 0;
    require(all_rows >= count && (may_differ || is_even), "a tensor of the batch given to the Pipeline ",
            tensor.defined() ? concatenate("has shape ", tensor.sizes()) : "is undefined", ", but ", count,
            " micro-batches need a first dimension that is a multiple of ", count,
            "; with PipelineOptions::weight_by_tokens it may be any number from ", count, " on");
    require(is_even ? rows_of(batch.front()) % count == 0 : all_rows == rows_of(batch.front()),
            "the tensors of a batch whose rows are no multiple of ", count,
            " micro-batches have as many rows each, not ", rows_of(batch.front()), " and ", all_rows,
            "; let a row of each belong to one example");
    int64_t first = 0;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t rows = all_rows / count + (k < all_rows % count ? 1 : 0);
      all[static_cast<size_t>(k)].push_back(tensor.narrow(0, first, rows));
      first += rows;
    }
  }
  return all;
}

// Of shapes, and of values in host memory: to read those on a GPU would wait for it.
std::string PipelineRun::checksum_of_batch(const Tensors& batch) const {
  Checksum sum;
  for (const at::Tensor& tensor : batch) {
    const std::string line = concatenate(tensor.scalar_type(), tensor.sizes(), ' ');
    sum.add(line.data(), line.size());
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) continue;
    const at::Tensor values = tensor.contiguous();
    sum.add(values.const_data_ptr(), values.nbytes());
  }
  return sum.hex();
}

at::Tensor PipelineRun::train(SessionWindow& window, const Tensors& batch) {
  const std::vector<Tensors> pieces = micro_batches(batch);
  const Progress before = window.parts().progress;
  const c10::DeviceGuard on_device(window.parts().device());
  for (size_t k = 0; k < pieces.size(); ++k) {
    batches_.push_back(window.begin(static_cast<int64_t>(k), pieces[k]));
    kinds_.push_back(hook_.messages().kind_of(batches_.back()));
  }
  at::Tensor loss;
  try {
    hook_.agree(before, checksum_of_batch(batch));
    run_plan(window);
    loss = mean_loss();
    window.end_backward();
  } catch (const std::exception& error) {
    window.fail(error);
  }
  return loss;
}

namespace {

// Calls f, which computes something of x in this stage. What another stage has sent is a leaf of the graph
// here.
template <class F>
auto reading(const Tensors& x, int64_t stage, const std::string& what, const F& f) {
  try {
    return f();
  } catch (const c10::Error& error) {
    const bool has_leaf = std::any_of(x.begin(), x.end(), [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_leaf() && tensor.requires_grad();
    });
    const std::string words = error.what_without_backtrace();
    if (!has_leaf || words.find("leaf Variable that requires grad") == std::string::npos) throw;
    throw InvalidArgument(concatenate(
        what, " writes in place to its input, with which stage ", stage,
        " of the pipeline begins and whose gradient another stage waits for; let it make a new tensor "
        "(x = x + y in place of x.add_(y)), or begin with x = x.clone()"));
  }
}

}  // namespace

void PipelineRun::run_plan(SessionWindow& window) {
  bool has_gone_backward = false;
  for (const PipelineAction& action : hook_.plan()) {
    if (action.pass != PipelinePass::forward && !std::exchange(has_gone_backward, true))
      window.begin_backward();
    switch (action.pass) {
      case PipelinePass::forward:
        forward(&window, action);
        break;
      case PipelinePass::backward:
      case PipelinePass::backward_input:
        backward(window, action);
        break;
      case PipelinePass::backward_weight:
        backward_weight(window, action);
        break;
    }
    hook_.messages().collect(/*wait=*/false);
  }
  hook_.messages().collect(/*wait=*/true);
}

void PipelineRun::forward(SessionWindow* window, const PipelineAction& action) {
  const int64_t stage = stage_of(action);
  const auto k = static_cast<size_t>(action.micro_batch);
  SavedPass saved;
  if (stage > 0) saved.inputs = hook_.messages().take_activations(stage, kinds_[k]);
  at::Tensor loss;
  {
    const auto pass = window ? window->pass(action.micro_batch) : ZeroedGradients::Scope(nullptr, nullptr);
    const auto scope = window ? window->forward(action.micro_batch) : nullptr;
    Tensors x = stage == 0 ? functions_.first(batches_[k]) : saved.inputs;
    for (int64_t i = hook_.stage_model().first_block(stage); i < hook_.stage_model().end_block(stage); ++i) {
      x = reading(x, stage, concatenate("block ", i),
                  [&] { return functions_.block(static_cast<size_t>(i), x); });
    }
    if (is_last(stage)) {
      loss = reading(x, stage, "the last function", [&] { return functions_.last(x, batches_[k]); });
    } else {
      saved.outputs = std::move(x);
    }
    if (scope) {
      scope->end();
      scope->throw_failure();
    }
  }
  if (is_last(stage)) {
    require(
        loss.defined() && loss.numel() == 1 && at::isFloatingType(loss.scalar_type()),
        "the last stage of a Pipeline needs a loss that is one floating-point number; take the mean over the "
        "micro-batch");
    add_loss(loss, window ? window->weight(action.micro_batch) : share_of_rows(k));
    if (window) saved.outputs = {window->scaled_loss(action.micro_batch, loss)};
  } else {
    hook_.messages().send_activations(stage, kinds_[k], saved.outputs);
    const bool has_loss = hook_.has_stage(hook_.schedule().stages() - 1);
    if (window && action.chunk == 0 && !has_loss) {  // for hooks that count
      (void)window->scaled_loss(action.micro_batch, at::zeros({}, device_options()));
    }
  }
  if (!window) return;
  saved.specs = specs_of(saved.outputs);
  saved_passes_[{action.micro_batch, action.chunk}] = std::move(saved);
}

void PipelineRun::backward(SessionWindow& window, const PipelineAction& action) {
  const auto pass = window.pass(action.micro_batch);
  const int64_t stage = stage_of(action);
  SavedPass& saved = saved_passes_.at({action.micro_batch, action.chunk});
  Tensors arrived;
  for (const at::Tensor& output : saved.outputs)
    replay_ahead(output);  // while the gradients are on their way
  if (!is_last(stage)) arrived = hook_.messages().take_gradients(stage, saved.specs);
  Tensors outputs, gradients;
  for (const at::Tensor& output : saved.outputs) {
    if (!output.requires_grad()) continue;
    outputs.push_back(output);
    gradients.push_back(is_last(stage) ? at::ones_like(output) : arrived[gradients.size()]);
  }
  Tensors inputs;
  for (const at::Tensor& input : saved.inputs) {
    if (input.requires_grad()) inputs.push_back(input);
  }
  Tensors to_send;
  if (action.pass == PipelinePass::backward_input) {
    saved.split = std::make_unique<SplitBackward>(outputs, inputs);
    to_send = saved.split->input_half(gradients);
    saved.outputs.clear();
  } else {
    if (!outputs.empty()) torch::autograd::backward(outputs, gradients);
    for (const at::Tensor& input : inputs) to_send.push_back(input.grad());
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    to_send[i] = to_send[i].defined() ? to_send[i].contiguous() : at::zeros_like(inputs[i]);
  }
  if (action.pass == PipelinePass::backward) saved_passes_.erase({action.micro_batch, action.chunk});
  if (stage > 0) hook_.messages().send_gradients(stage, to_send);
}

void PipelineRun::backward_weight(SessionWindow& window, const PipelineAction& action) {
  const auto pass = window.pass(action.micro_batch);
  const auto saved = saved_passes_.find({action.micro_batch, action.chunk});
  saved->second.split->weight_half();
  saved_passes_.erase(saved);
}

double PipelineRun::share_of_rows(size_t k) const {
  const auto rows = [&](size_t micro_batch) {
    return static_cast<double>(batches_[micro_batch].front().size(0));
  };
  return batches_[k].empty() ? 1.0 : rows(k) / rows(0);
}

void PipelineRun::add_loss(const at::Tensor& loss, double weight) {
  if (weight == 0) return;  // it may be 0 / 0
  const at::Tensor part = loss.detach().to(at::kFloat).reshape({}) * weight;
  loss_ = loss_.defined() ? loss_ + part : part;
  weight_ += weight;
}

at::Tensor PipelineRun::mean_loss() {
  const Grid& grid = hook_.grid();
  at::Tensor mean = loss_.defined() ? loss_ / (weight_ > 0 ? weight_ : 1.0) : at::zeros({}, device_options());
  if (grid.stages() > 1) {
    grid.pipeline()->broadcast(mean, grid.stages() - 1, CollectiveOptions().agreed(true)).wait();
  }
  return mean;
}

at::Tensor PipelineRun::evaluate(const Tensors& batch) {
  SessionParts& parts = *hook_.session_parts();
  const c10::DeviceGuard on_device(parts.device());
  EvaluationScope scope(parts);  // also inside Session::evaluate, which costs next to nothing
  const std::vector<Tensors> pieces = micro_batches(batch);
  try {
    hook_.require_same_batch(checksum_of_batch(batch));
    for (const Tensors& piece : pieces) {
      batches_.emplace_back();
      for (const at::Tensor& tensor : piece)
        batches_.back().push_back(copy_to_device(tensor, parts.device()));
      kinds_.push_back(hook_.messages().kind_of(batches_.back()));
    }
    for (const PipelineAction& action : hook_.plan()) {
      if (action.pass == PipelinePass::forward) forward(nullptr, action);
    }
    hook_.messages().collect(/*wait=*/true);
    scope.end_pass();
    return mean_loss();
  } catch (const std::exception& error) {
    hook_.messages().drop();
    if (hook_.grid().world()->world_size() > 1)
      hook_.grid().world()->leave(concatenate("evaluation failed: ", error.what()));
    throw;
  }
}

}  // namespace pacer::detail
