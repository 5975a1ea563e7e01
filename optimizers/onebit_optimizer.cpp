#include <pacer/optimizers/onebit_optimizer.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/detail/cuda_stream.h>
#include <pacer/collectives/gradient_bucketer.h>
#include <pacer/core/error.h>
#include <pacer/optimizers/detail/adam_engine.h>
#include <pacer/optimizers/detail/onebit_engine.h>
#include <pacer/optimizers/detail/onebit_flavour.h>
#include <pacer/optimizers/detail/onebit_groups.h>
#include <pacer/optimizers/freeze_rule.h>

namespace pacer {

using torch::optim::OptimizerParamGroup;

OneBitOptimizer::OneBitOptimizer(const detail::AdamFlavour& flavour,
                                 const std::vector<OptimizerParamGroup>& groups,
                                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                 std::shared_ptr<Communicator> world)
    : FusedOptimizer(flavour, groups, std::move(defaults)) {
  set_up(std::move(world));
}
OneBitOptimizer::OneBitOptimizer(const detail::AdamFlavour& flavour,
                                 const std::vector<NamedParamGroup>& groups,
                                 std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                 std::shared_ptr<Communicator> world)
    : FusedOptimizer(flavour, groups, std::move(defaults)) {
  set_up(std::move(world));
}
OneBitOptimizer::~OneBitOptimizer() = default;

const char* OneBitOptimizer::name() const { return flavour().name; }

detail::OneBitPlan OneBitOptimizer::read_plan() const {
  detail::OneBitPlan plan = detail::onebit_plan(name(), param_groups_);
  route(plan);  // throws where it cannot be hierarchical
  return plan;
}

std::vector<detail::AdamGroupSettings> OneBitOptimizer::settings() const {
  return detail::settings_of(flavour(), param_groups_);
}

void OneBitOptimizer::set_up(std::shared_ptr<Communicator> world) {
  detail::check_compressible(name(), param_groups_, names());
  const at::Device device = detail::device_of(param_groups_);
  world_ = world ? std::move(world) : Communicator::alone(device);
  require(world_->device() == device, name(), ": the parameters are on ", device.str(), ", but ",
          world_->backend_name(), " joins the ranks on ", world_->device().str(),
          "; move the model there first");
  plan_ = std::make_unique<detail::OneBitPlan>(read_plan());
  if (plan_->freeze_automatically) {
    rule_ = std::make_unique<FreezeRule>(*plan_->freeze_automatically,
                                         detail::first_beta2(flavour(), param_groups_));
  }
  own_guard_ = std::make_shared<GradientGuard>(device);
  announce_phase();
}

template <class Group>
void OneBitOptimizer::add_group(const Group& group) {
  require(!frozen_at_, name(), ": a parameter group cannot be added after the variance froze (step ",
          frozen_at_.value_or(0), "), because it has seen nothing of the new parameters; add it before");
  std::vector<OptimizerParamGroup> before = param_groups_;
  FusedOptimizer::add_param_group(group);
  try {
    detail::check_compressible(name(), param_groups_, names());
    *plan_ = read_plan();
  } catch (...) {
    param_groups_ = std::move(before);
    throw;
  }
  bucketer_.reset();
}
void OneBitOptimizer::add_param_group(const OptimizerParamGroup& group) { add_group(group); }
void OneBitOptimizer::add_param_group(const NamedParamGroup& group) { add_group(group); }

// ---- Which step comes next. ----

detail::OneBitRoute OneBitOptimizer::route(const detail::OneBitPlan& plan) const {
  return {world_, plan.compression.hierarchical()};
}

bool OneBitOptimizer::exchanges(const detail::OneBitPlan& plan) const {
  return plan.one_bit && (route(plan).workers() > 1 || plan.compress_alone);
}

OneBitOptimizer::Kind OneBitOptimizer::kind_of_next_step() const {
  if (!frozen_at_) return Kind::warm_up;
  const int64_t every = plan_->refresh_variance_every;
  if (every > 0 && (attempts_ + 1 - *frozen_at_) % every == 0) return Kind::refresh;
  return compressed_->compresses() ? Kind::compressed : Kind::dense;
}

void OneBitOptimizer::announce_phase() const {
  const auto name = [](Kind kind) {
    switch (kind) {
      case Kind::warm_up:
        return "warm-up";
      case Kind::compressed:
        return "compressed";
      case Kind::refresh:
        return "refresh";
      case Kind::dense:
        break;
    }
    return "frozen";
  };
  world_->set_phase(name(kind_of_next_step()));
}

OneBitPhase OneBitOptimizer::phase() const {
  return frozen_at_ ? OneBitPhase::compressed : OneBitPhase::warm_up;
}

GradientScope OneBitOptimizer::gradient_scope() const {
  if (kind_of_next_step() != Kind::compressed) return GradientScope::world;
  return route(*plan_).is_by_nodes() ? GradientScope::node : GradientScope::rank;
}

std::vector<torch::Tensor> OneBitOptimizer::local_parameters() const {
  std::vector<torch::Tensor> local;
  if (!exchanges(*plan_)) return local;
  for (const auto& group : param_groups_) {
    if (!detail::is_compressed(group)) continue;
    local.insert(local.end(), group.params().begin(), group.params().end());
  }
  return local;
}

void OneBitOptimizer::check_run(const Communicator& world, const Unsettled& unsettled) const {
  require(world.world_size() == world_->world_size() && world.rank() == world_->rank(), name(),
          " was given a Communicator of ", world_->world_size(), " ranks, and the Session one of ",
          world.world_size(), "; give both the same");
  if (!plan_->freeze_step || plan_->allow_early_freeze || frozen_at_) return;
  const std::string moves = unsettled(*plan_->freeze_step);
  require(moves.empty(), name(), ": freeze_step(", *plan_->freeze_step, ") comes while ", moves,
          " still moves, and the frozen variance would be that of other data; freeze later, use "
          "freeze_automatically, or say allow_early_freeze(true)");
}

// ---- A step. ----

// Adds over ranks what has to be added, and says how to make it a mean.
StepInputs OneBitOptimizer::plain_step_inputs() {
  if (world_->world_size() == 1) return {};
  if (bucketer_ == nullptr) {
    std::vector<GradientBucketer::NamedParameter> named;
    for (const auto& group : param_groups_) {
      for (const torch::Tensor& parameter : group.params()) {
        named.emplace_back(parameter_name(parameter), parameter);
      }
    }
    bucketer_ = std::make_unique<GradientBucketer>(named, world_, BucketOptions(), local_parameters());
  }
  world_->set_step(attempts_);
  bucketer_->set_scope(gradient_scope());
  bucketer_->reduce();
  bucketer_->wait();
  StepInputs inputs;
  inputs.local_weight = world_->world_size() * bucketer_->scale();
  inputs.average = 1.0 / inputs.local_weight;
  return inputs;
}

void OneBitOptimizer::prepare(const StepInputs& inputs) {
  const at::NoGradGuard no_grad;
  require(!inputs.replayable, name(),
          " talks to other ranks in the middle of a step, so that it cannot be replayed from a CUDA "
          "graph; leave the CudaGraph hook out");
  adopt_foreign_options();
  const detail::OneBitPlan plan = read_plan();
  require(plan.freeze_automatically == plan_->freeze_automatically, name(),
          ": freeze_automatically was set or changed in the middle of a run; build a new optimizer");
  require(attempts_ == 0 || plan.exchanges_like(*plan_), name(),
          ": which groups are compressed, and how, was changed after step ", attempts_,
          "; set compress, one_bit, compress_alone, variance_floor and scales before the first one");
  inputs_ = inputs;
  if (inputs_.guard == nullptr) inputs_.guard = own_guard_;
  *plan_ = plan;
  kind_ = kind_of_next_step();
  if (kind_ == Kind::warm_up) {
    FusedOptimizer::prepare(inputs_);
  } else {
    compressed_->prepare(settings(), plan_->refresh_variance_every);
    full_precision_groups_ = detail::full_precision_groups(param_groups_);
    prepare_groups(full_precision_groups_, inputs_);
  }
  guard_ = inputs_.guard;
}

// Times average times this, stored gradients that were not added over the world are their worker's mean.
double OneBitOptimizer::local_weight() const {
  const detail::OneBitRoute route = this->route(*plan_);
  return route.is_by_nodes() ? static_cast<double>(route.workers()) : inputs_.local_weight;
}

// The guard looks at all stored gradients, as if those of workers had been added, whose noise does not
// cancel.
void OneBitOptimizer::look() {
  const at::Tensor sums = at::zeros({3}, at::TensorOptions().dtype(at::kDouble).device(world_->device()));
  auto* own = sums.mutable_data_ptr<double>();  // and that of averaged gradients, and the joint sum
  double *averaged = own + 1, *total = own + 2;
  compressed_->sum_of_squares(own);
  engine().sum_of_squares(averaged);
  const bool is_local = kind_ == Kind::compressed;
  const int64_t workers = is_local ? route(*plan_).workers() : 1;
  at::Tensor all = sums;
  if (workers > 1) {
    all = at::empty({world_->world_size()}, sums.options());
    const at::Tensor mine = sums.narrow(0, 0, 1);
    const auto agreed = CollectiveOptions().agreed(true);
    (sums.is_cuda() ? world_->all_gather(all, mine, agreed) : world_->all_gather_host(all, mine)).wait();
    all = all.view({workers, -1}).select(1, 0).contiguous();  // the ranks of a worker have the same
  }
  const double weight = is_local ? local_weight() / static_cast<double>(workers) : 1.0;
  const auto* of_workers = all.const_data_ptr<double>();
  if (sums.is_cuda()) {
    kernels::joint_sum_of_squares_cuda(of_workers, workers, weight, averaged, total,
                                       detail::current_stream(sums.device()));
  } else {
    *total = kernels::joint_sum_of_squares(of_workers, workers, weight, *averaged);
  }
  guard_->look(total, 1, inputs_.average);
}

bool OneBitOptimizer::enqueue() {
  const at::NoGradGuard no_grad;
  if (kind_ == Kind::warm_up) return FusedOptimizer::enqueue();
  if (kind_ == Kind::compressed && !std::exchange(has_agreed_, true)) {
    compressed_->exchange().agree(attempts_);
  }
  const c10::DeviceGuard device_guard(world_->device());
  look();
  const kernels::GradientCheck* check = guard_->check();
  if (world_->device().is_cpu() && check->non_finite != 0) return false;  // on CUDA only the device knows
  if (kind_ == Kind::compressed) {
    compressed_->exchange_step(check, local_weight(), attempts_);
  } else {
    compressed_->dense_step(check, /*refresh=*/kind_ == Kind::refresh);
  }
  engine().enqueue(/*has_looked=*/true);
  return true;
}

void OneBitOptimizer::conclude(bool applied) {
  ++attempts_;
  if (kind_ == Kind::warm_up) {
    FusedOptimizer::conclude(applied);
    consider_freeze();
  } else {
    engine().conclude(applied);
  }
  announce_phase();  // already here: a Session's gradients travel before the next prepare()
}

int64_t OneBitOptimizer::skipped_steps() const { return guard_ ? guard_->read().skipped_steps : 0; }

int64_t OneBitOptimizer::bytes_sent() const {
  return compressed_ && compressed_->compresses() ? compressed_->exchange().bytes_sent() : 0;
}

double OneBitOptimizer::compression_error() const {
  return compressed_ ? compressed_->compression_error() : 0;
}

}  // namespace pacer
