#include <pacer/parallel/detail/pipeline_hook.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/missed_parameters.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/detail/touch_remedy.h>

namespace pacer::detail {
namespace {

std::string described(const PipelineSchedule& schedule) {
  return concatenate(schedule_name(schedule.order), " over ", schedule.ranks, " ranks, ", schedule.chunks,
                     " stages a rank");
}

// All ranks must have the same schedule before they make queues, whose number follows from it.
StageCut cut_of(const Blocks& blocks, PipelineSchedule schedule, const Grid& grid,
                const PipelineOptions& options) {
  require(!blocks.is_empty() && blocks->size() > 0,
          "Pipeline was given Blocks without a block; add the blocks before it is made");
  schedule.ranks = grid.stages();
  schedule.validate();
  const auto count = static_cast<int64_t>(blocks->size());
  StageCut cut{schedule, options.cut(), options.first(), options.last()};
  if (cut.bounds.empty()) cut.bounds = StageCut::even(count, schedule.stages());
  cut.validate(count);
  require_agreement(*grid.world(), 0, {{"pipeline", described(schedule)}});
  return cut;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text = "{";
  for (const std::string& name : names) text += (text.size() > 1 ? ", " : "") + name;
  return text + "}";
}

// Checksums of the batches that ranks were given, while they travel.
class BatchComparison {
 public:
  BatchComparison(Communicator& ranks, const std::string& own)
      : ranks_(ranks), bytes_(static_cast<int64_t>(own.size())), own_(at::empty({bytes_}, at::kByte)) {
    std::memcpy(own_.mutable_data_ptr(), own.data(), own.size());
    all_ = at::empty({ranks.world_size() * bytes_}, at::kByte);
    work_ = ranks.all_gather_host(all_, own_, CollectiveOptions().agreed(true));
  }
  // Rank r is one of pipeline r % pipelines. Throws CommunicationError where ranks of one differ.
  void require_same(int pipelines, int64_t step) {
    work_.wait();
    const auto* of_ranks = all_.const_data_ptr<uint8_t>();
    for (int rank = pipelines; rank < ranks_.world_size(); ++rank) {
      const int first = rank % pipelines;
      const auto size = static_cast<size_t>(bytes_);
      if (std::memcmp(of_ranks + rank * bytes_, of_ranks + first * bytes_, size) == 0) continue;
      const int a = ranks_.rank_in_world(first), b = ranks_.rank_in_world(rank);
      throw CommunicationError(
          concatenate("rank ", a, " and rank ", b,
                      " of one pipeline were given different batches; load the same one on all ranks of a "
                      "pipeline, for example with EpochSampler(size, seed, *grid.replicas())"),
          "agreement", 0, step, {b});
    }
  }

 private:
  Communicator& ranks_;
  int64_t bytes_;
  at::Tensor own_, all_;
  Work work_;
};

// Whether a rank has something new to tell, while that travels.
class News {
 public:
  News(Communicator& ranks, bool has_news)
      : own_(at::full({1}, has_news, at::kByte)), all_(at::empty({ranks.world_size()}, at::kByte)) {
    work_ = ranks.all_gather_host(all_, own_, CollectiveOptions().agreed(true));
  }
  bool of_any() {
    work_.wait();
    const auto* of_ranks = all_.const_data_ptr<uint8_t>();
    return std::any_of(of_ranks, of_ranks + all_.numel(), [](uint8_t has_news) { return has_news != 0; });
  }

 private:
  at::Tensor own_, all_;
  Work work_;
};

}  // namespace

PipelineHook::PipelineHook(torch::nn::Module& model, const Blocks& blocks, Grid grid,
                           const PipelineSchedule& schedule, PipelineOptions options)
    : ParallelTraining(options.initial_parameters(), options.sync_buffers(), options.unused_is_zero()),
      model_(model),
      held_model_(model.weak_from_this().lock()),
      grid_(std::move(grid)),
      options_(std::move(options)),
      stage_model_(model, blocks, cut_of(blocks, schedule, grid_, options_), grid_.stage(),
                   grid_.world()->device()),
      plan_(pipeline_plan(this->schedule(), grid_.stage())),
      messages_(grid_.pipeline(), this->schedule()) {}

std::string PipelineHook::agreement() const {
  const StageCut& cut = stage_model_.cut();
  return concatenate(
      schedule_name(cut.schedule.order), " over ", cut.schedule.ranks, " ranks, ", cut.schedule.micro_batches,
      " micro-batches", options_.weight_by_tokens() ? " by tokens" : "",
      options_.accumulate_in_fp32() ? "" : " that add up in their own dtype", ", ", cut.schedule.chunks,
      " stages a rank, cut at ", at::IntArrayRef(cut.bounds), ", first ", listed(cut.first), ", last ",
      listed(cut.last), ", unused parameters ", options_.unused_is_zero() ? "are zero" : "are an error");
}

void PipelineHook::attach(SessionParts& parts) {
  require(&parts.model() == &model_, "the Pipeline was made for another model than the Session's");
  require(parts.shared_world() == grid_.world(),
          "the Pipeline's Grid was made from another Communicator than the Session has; give both the same");
  const SessionOptimizer* optimizer = parts.session_optimizer();
  require(
      optimizer == nullptr || optimizer->local_parameters().empty(),
      "a 1-bit optimizer cannot train a Pipeline: its ranks exchange momentum of the same parameters, and "
      "stages have different ones; use pacer::FusedAdam, FusedAdamW, FusedLamb, FusedSgd, FusedRmsprop or "
      "one of torch's");
  require(
      optimizer == nullptr || !optimizer->averages_weights(),
      "a Pipeline cannot train with an optimizer that averages the weights: a tensor that stages share would "
      "have its average on one rank only; use pacer::FusedAdamW, or DataParallel");
  std::unordered_set<const void*> own;
  for (const auto& item : stage_model_.parameters()) own.insert(item.value().unsafeGetTensorImpl());
  for (const auto& [name, parameter] : named_optimizer_parameters(parts)) {
    require(own.count(parameter.unsafeGetTensorImpl()) != 0, "the optimizer has \"", name,
            "\", which another rank of the pipeline updates; make the optimizer from "
            "pipeline.named_parameters()");
  }
  ParallelTraining::attach(parts);
  attached_ = &parts;
  parts.micro_steps = schedule().micro_batches;
  parts.weight_by_tokens = options_.weight_by_tokens();
  parts.replicas = grid_.replicas();
  parts.tensors_on_other_ranks = parts.updated_on_other_ranks = stage_model_.elsewhere();
  for (const TiedParameter& tied : stage_model_.tied()) {
    if (tied.ranks.front() != grid_.stage()) {
      parts.updated_on_other_ranks.insert(tied.parameter.unsafeGetTensorImpl());
    }
  }
  parts.guard()->look_with(grid_.pipeline());
}

void PipelineHook::arrange() {
  require(!parts().accumulates_gradients,
          "a Pipeline's micro-batches are those of GradientAccumulation; leave that hook out, and weigh by "
          "tokens with PipelineOptions::weight_by_tokens");
  require(!parts().writes_whole_model,
          "SaveBest writes the whole model, of which a Pipeline's ranks have a stage each; leave it out, and "
          "take the weights of the best step from a checkpoint");
  require(!parts().replay_optimizer,
          "Pipeline and CudaGraph do not go together: ranks exchange norms inside the captured step; leave "
          "CudaGraph out");
  require(
      parts().saves_frozen,
      "Checkpoints cannot leave frozen weights out with a Pipeline, whose ranks each have a part of them; "
      "leave save_frozen(false) out");
}

void PipelineHook::start(const Progress& progress) {
  ParallelTraining::start(progress);
  share_tied_values();
}

double PipelineHook::join() {
  const bool trains = !trained_parameters(parts()).empty();
  const std::vector<std::string> of_ranks = grid_.pipeline()->exchange(trains ? "trains" : "");
  require(std::count(of_ranks.begin(), of_ranks.end(), "trains") > 0,
          "no parameter that the ranks of the pipeline update needs a gradient, so that steps would change "
          "nothing; unfreeze some");
  watch_gradients();
  bucketer_.reset();  // takes its hooks from the parameters before the next one adds its own
  if (grid_.pipelines() > 1 && trains) {
    bucketer_ = std::make_unique<GradientBucketer>(named_optimizer_parameters(parts()), grid_.replicas(),
                                                   BucketOptions().unused_is_zero(options_.unused_is_zero()));
  }
  return bucketer_ ? bucketer_->scale() : 1.0;
}

void PipelineHook::watch_gradients() {
  withheld_.reset();
  if (grid_.world()->world_size() == 1) return;
  withheld_ = std::make_unique<WithheldGradients>(kTouchRemedy);
  std::unordered_set<const void*> own;
  for (const auto& [name, parameter] : named_optimizer_parameters(parts())) {
    own.insert(parameter.unsafeGetTensorImpl());
    withheld_->add(name, parameter);
  }
  for (const TiedParameter& tied : stage_model_.tied()) {
    if (own.count(tied.parameter.unsafeGetTensorImpl()) == 0) withheld_->add(tied.name, tied.parameter);
  }
}

// Around the passes of all micro-batches. Nothing looks at gradients before the last one has ended.
void PipelineHook::backward_begin(const Progress& progress) {
  if (!options_.accumulate_in_fp32() || progress.micro_steps == 1) return;
  std::vector<at::Tensor> summed = trained_parameters(parts());
  for (const TiedParameter& tied : stage_model_.tied()) summed.push_back(tied.parameter);
  wide_.watch(summed);
  wide_.begin_pass();
}

void PipelineHook::backward_end(const Progress& /*progress*/) {
  wide_.end_pass();
  wide_.round_the_rest();
  if (withheld_) withheld_->withhold_all();
}

void PipelineHook::backward_failed() {
  messages_.drop();
  wide_.end_pass();
  if (withheld_) withheld_->put_back();
  if (bucketer_) bucketer_->drop();
  ParallelTraining::backward_failed();
}

void PipelineHook::agree(const Progress& progress, const std::string& data) {
  if (!is_joined()) return;
  // The first announcement says which buffers training will change.
  ParallelTraining::forward_begin(progress);
  follow_parameters(progress);
  announce(progress, Intent::step);
  // Of all pipelines, so that none of them begins where another one cannot.
  BatchComparison compared(*grid_.world(), data);
  await_totals();
  compared.require_same(grid_.pipelines(), progress.step);
}

void PipelineHook::require_same_batch(const std::string& data) const {
  BatchComparison(*grid_.pipeline(), data).require_same(/*pipelines=*/1, parts().progress.step);
}

void PipelineHook::gradients_ready(const Progress& window) {
  if (withheld_) withheld_->give_back();
  add_tied_gradients();
  if (!is_joined()) return;
  // The window was announced before its passes, which may have been the first to write to something.
  std::optional<News> changes;
  if (grid_.pipelines() > 1) changes.emplace(*grid_.replicas(), sees_changes());
  if (bucketer_) {
    bucketer_->reduce(parts().unused(window));
  } else if (!unused_is_zero()) {
    check_all_reached(parts());
  }
  Work losses = add_losses();
  if (bucketer_) bucketer_->wait();
  if (changes && changes->of_any()) learn_changes();
  share_written_parameters();
  losses.wait();
}

// In the order of the ranks, on the rank that updates the parameter.
void PipelineHook::add_tied_gradients() {
  const at::NoGradGuard no_grad;
  for (const TiedParameter& tied : stage_model_.tied()) {
    if (!tied.parameter.requires_grad()) continue;
    at::Tensor& gradient = at::Tensor(tied.parameter).mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(tied.parameter);
    gradient = gradient.contiguous();
    const int owner = tied.ranks.front();
    if (grid_.stage() != owner) {
      grid_.pipeline()->send(gradient, owner, CollectiveOptions().agreed(true)).wait();
      gradient.reset();
      continue;
    }
    for (size_t i = 1; i < tied.ranks.size(); ++i) {
      const at::Tensor other = at::empty_like(gradient);
      grid_.pipeline()->receive(other, tied.ranks[i], CollectiveOptions().agreed(true)).wait();
      gradient.add_(other);
    }
  }
}

void PipelineHook::after_step(StepReport& report) {
  share_tied_values();
  ParallelTraining::after_step(report);
}

void PipelineHook::share_tied_values() {
  const at::NoGradGuard no_grad;
  for (const TiedParameter& tied : stage_model_.tied()) {
    const at::Tensor values = tied.parameter.detach();
    const at::Tensor message = values.contiguous();
    const int owner = tied.ranks.front();
    if (grid_.stage() == owner) {
      for (size_t i = 1; i < tied.ranks.size(); ++i) {
        grid_.pipeline()->send(message, tied.ranks[i], CollectiveOptions().agreed(true)).wait();
      }
    } else {
      grid_.pipeline()->receive(message, owner, CollectiveOptions().agreed(true)).wait();
      if (!message.is_same(values)) at::Tensor(values).copy_(message);
    }
  }
}

}  // namespace pacer::detail
