#include <pacer/optimizers/onebit_muon.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/device/detail/failure_text.h>
#include <pacer/optimizers/detail/direction_exchange.h>
#include <pacer/optimizers/detail/onebit_errors.h>
#include <pacer/optimizers/detail/onebit_rank_state.h>
#include <pacer/optimizers/detail/optimizer_archive.h>
#include <pacer/optimizers/detail/step_across_ranks.h>
#include <pacer/optimizers/detail/step_engine.h>

namespace pacer {
namespace {

constexpr const char* kName = "OneBitMuon";
constexpr const char* kMomentum = "/exp_avg";

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::string in_words(const CompressionOptions& options) {
  return detail::concatenate("scale ", options.scale() == ScaleNorm::rms ? "rms" : "l1", ", block_scales ",
                             options.block_scales(), ", compress_alone ", options.compress_alone(),
                             ", hierarchical ", options.hierarchical());
}

// The mean over ranks, where each has one; undefined where none has.
at::Tensor mean_momentum(const std::vector<NamedTensors>& rank_states, const std::string& key) {
  at::Tensor sum;
  int64_t count = 0;
  for (const NamedTensors& state : rank_states) {
    const auto found = state.find(key);
    if (found == state.end()) continue;
    if (!sum.defined()) sum = at::zeros_like(found->second, at::kDouble);
    require(found->second.sizes() == sum.sizes(), "\"", key,
            "\" of the state to load has other shapes on other ranks");
    sum.add_(found->second);
    ++count;
  }
  require(count == 0 || count == static_cast<int64_t>(rank_states.size()), "\"", key,
          "\" of the state to load is not there on all ranks; a rank's file is missing or of another run");
  return count == 0 ? sum
                    : sum.div_(static_cast<double>(count)).to(rank_states.front().at(key).scalar_type());
}

}  // namespace

using torch::optim::OptimizerParamGroup;

OneBitMuon::OneBitMuon(const std::vector<OptimizerParamGroup>& groups, OneBitMuonOptions defaults,
                       std::shared_ptr<Communicator> world)
    : FusedOptimizer(groups, std::make_unique<OneBitMuonOptions>(std::move(defaults))) {
  set_up(std::move(world));
}
OneBitMuon::OneBitMuon(const std::vector<NamedParamGroup>& groups, OneBitMuonOptions defaults,
                       std::shared_ptr<Communicator> world)
    : FusedOptimizer(groups, std::make_unique<OneBitMuonOptions>(std::move(defaults))) {
  set_up(std::move(world));
}
OneBitMuon::OneBitMuon(std::vector<torch::Tensor> parameters, OneBitMuonOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitMuon({OptimizerParamGroup(std::move(parameters))}, std::move(defaults), std::move(world)) {}
OneBitMuon::OneBitMuon(const NamedParameters& parameters, OneBitMuonOptions defaults,
                       std::shared_ptr<Communicator> world)
    : OneBitMuon(std::vector<NamedParamGroup>(1, NamedParamGroup(parameters)), std::move(defaults),
                 std::move(world)) {}
OneBitMuon::~OneBitMuon() = default;

void OneBitMuon::set_up(std::shared_ptr<Communicator> world) {
  at::Device device = world ? world->device() : at::Device(at::kCPU);
  for (const auto& group : param_groups_) {
    for (const torch::Tensor& parameter : group.params()) device = parameter.device();
  }
  world_ = world ? std::move(world) : detail::alone(kName, device);
  detail::require_joined_on(device, kName, *world_);
  exchanges(detail::settings_of(traits(), param_groups_));  // checks what groups and ranks must have
  across_ranks_ = std::make_unique<detail::StepAcrossRanks>(world_);
  guard_ = std::make_shared<GradientGuard>(world_->device());
}

CompressionOptions OneBitMuon::compression(const std::vector<detail::GroupSettings>& settings) const {
  for (size_t g = 1; g < settings.size(); ++g) {
    require(detail::send_alike(settings[g].compression, settings[0].compression), kName, ": group ", g,
            " has ", in_words(settings[g].compression), ", and group 0 ", in_words(settings[0].compression),
            "; what ranks exchange is one buffer, so set these alike in all groups");
  }
  return settings.empty() ? CompressionOptions() : settings.front().compression;
}

bool OneBitMuon::exchanges(const std::vector<detail::GroupSettings>& settings) const {
  const CompressionOptions options = compression(settings);
  const bool has_others =
      options.compress_alone() || detail::OneBitRoute(world_, options.hierarchical()).workers() > 1;
  return has_others && std::any_of(settings.begin(), settings.end(),
                                   [](const auto& group) { return group.muon.has_value(); });
}

std::unique_ptr<detail::DirectionExchange> OneBitMuon::make_exchange(
    const std::vector<detail::GroupSettings>& settings) const {
  if (!exchanges(settings)) return nullptr;
  return std::make_unique<detail::DirectionExchange>(detail::exchanged_matrices(view(), settings), world_,
                                                     compression(settings));
}

int64_t OneBitMuon::bytes_sent() const {
  return engine().directions() ? engine().directions()->bytes_sent() : 0;
}

// ---- A step. ----

GradientScope OneBitMuon::gradient_scope() const {
  const auto settings = detail::settings_of(traits(), param_groups_);
  if (!exchanges(settings)) return GradientScope::world;
  const detail::OneBitRoute route(world_, compression(settings).hierarchical());
  return route.is_by_nodes() ? GradientScope::node : GradientScope::rank;
}

std::vector<torch::Tensor> OneBitMuon::local_parameters() const {
  const auto settings = detail::settings_of(traits(), param_groups_);
  std::vector<torch::Tensor> local;
  if (!exchanges(settings)) return local;
  for (size_t g = 0; g < param_groups_.size(); ++g) {
    const std::vector<torch::Tensor>& matrices = param_groups_[g].params();
    if (settings[g].muon) local.insert(local.end(), matrices.begin(), matrices.end());
  }
  return local;
}

StepInputs OneBitMuon::plain_step_inputs() {
  if (world_->world_size() == 1) return {};
  require_intact();
  adopt_foreign_options();
  return across_ranks_->inputs(view(), attempts_, local_parameters(), gradient_scope());
}

void OneBitMuon::prepare(const StepInputs& inputs) {
  const at::NoGradGuard no_grad;
  require_intact();
  adopt_foreign_options();
  auto settings = detail::settings_of(traits(), param_groups_);
  if (engine().directions() == nullptr && exchanges(settings)) {
    engine().exchange_directions(make_exchange(settings));
  }
  detail::DirectionExchange* const directions = engine().directions();
  StepInputs with_guard = inputs;
  if (directions != nullptr) {
    require(!inputs.replayable, kName,
            " talks to other ranks in the middle of a step, so that it cannot be replayed from a CUDA graph; "
            "leave the CudaGraph hook out");
    require(
        detail::send_alike(directions->options(), compression(settings)), kName,
        ": scale, block_scales, compress_alone or hierarchical was changed after the first step; set them "
        "before it");
    const detail::OneBitRoute& route = directions->route();
    directions->begin(route.is_by_nodes() ? static_cast<double>(route.workers()) : inputs.local_weight);
    if (with_guard.guard == nullptr) with_guard.guard = guard_;
  }
  engine().prepare(param_groups_, std::move(settings), state_, names(), with_guard);
}

bool OneBitMuon::enqueue() {
  try {
    return FusedOptimizer::enqueue();
  } catch (const std::exception& error) {
    if (engine().directions() && engine().directions()->is_under_way()) detail::keep_failure(error, failure_);
    throw;
  }
}

void OneBitMuon::conclude(bool applied) {
  ++attempts_;
  FusedOptimizer::conclude(applied);
  if (engine().directions()) engine().directions()->conclude();
}

void OneBitMuon::require_intact() const {
  require<Error>(failure_.empty(), kName, ": a step failed half-way (", failure_,
                 "), and what its state is worth is unknown; load a checkpoint");
}

void OneBitMuon::check_run(const Communicator& world, const RunPlan& /*run*/) const {
  detail::require_same_ranks(kName, *world_, world);
}

std::string OneBitMuon::unshared_reason(GradientScope /*among*/) const {
  return "each rank orthogonalises whole matrices of its own momentum; use DataParallel";
}

void OneBitMuon::name_parameters(const NamedParameters& of_model) {
  FusedOptimizer::name_parameters(of_model);
  if (!engine().directions()) return;
  std::vector<std::string> now;
  for (const auto& matrix : detail::exchanged_matrices(view(), detail::settings_of(traits(), param_groups_)))
    now.push_back(matrix.name);
  engine().directions()->rename(now);
}

// ---- State. ----

bool OneBitMuon::has_rank_state() const {
  return engine().directions() != nullptr && engine().directions()->has_errors();
}

NamedTensors OneBitMuon::export_state() const {
  require_intact();
  NamedTensors state = FusedOptimizer::export_state();
  if (!has_rank_state()) return state;
  for (const auto& matrix : engine().directions()->matrices()) state.erase(matrix.name + kMomentum);
  return state;
}

NamedTensors OneBitMuon::export_rank_state() const {
  require_intact();
  NamedTensors state;
  if (!has_rank_state()) return state;
  const NamedTensors all = FusedOptimizer::export_state();
  for (const auto& matrix : engine().directions()->matrices()) {
    const auto momentum = all.find(matrix.name + kMomentum);
    if (momentum != all.end()) state.insert(*momentum);
  }
  engine().directions()->export_errors(state);
  detail::add_rank(engine().directions()->route(), {0}, state);
  return state;
}

// A state that one rank by itself has left is everybody's.
bool OneBitMuon::fits_rank_state(const NamedTensors& state, const NamedTensors& rank_state) const {
  const auto settings = detail::saved_settings(state, view());
  const detail::OneBitRoute route(world_, compression(settings).hierarchical());
  return rank_state.empty() || (exchanges(settings) && detail::is_of_rank(route, rank_state));
}

NamedTensors OneBitMuon::join_rank_states(const NamedTensors& state,
                                          const std::vector<NamedTensors>& rank_states) const {
  NamedTensors joined;
  if (std::all_of(rank_states.begin(), rank_states.end(), [](const auto& one) { return one.empty(); }))
    return joined;
  const auto settings = detail::saved_settings(state, view());
  const std::vector<detail::OneBitTensor> matrices = detail::exchanged_matrices(view(), settings);
  for (const detail::OneBitTensor& matrix : matrices) {
    const at::Tensor mean = mean_momentum(rank_states, matrix.name + kMomentum);
    if (mean.defined()) joined[matrix.name + kMomentum] = mean;
  }
  const auto exchange = make_exchange(settings);
  if (!exchange) return joined;  // what was not sent yet is dropped, as there is nobody to send it to
  detail::add_rank(exchange->route(), {0}, joined);
  const std::vector<NamedTensors> states = detail::states_of_workers(rank_states, matrices);
  for (size_t i = 0; i < matrices.size(); ++i) {
    detail::add_errors(detail::join_errors(states, matrices[i]), matrices[i], exchange->served_part(i),
                       joined);
  }
  return joined;
}

SessionOptimizer::PreparedImport OneBitMuon::prepare_import(const NamedTensors& state,
                                                            const NamedTensors& rank_state) {
  const at::NoGradGuard no_grad;
  NamedTensors whole = state, errors;
  for (const auto& [name, tensor] : rank_state) {
    // Momentum becomes the optimizer's own.
    if (ends_with(name, kMomentum)) {
      whole[name] = tensor.clone();
    } else {
      errors[name] = tensor;
    }
  }
  struct Ready {  // in a shared_ptr, because a std::function is copied
    detail::PendingState pending;
    std::unique_ptr<detail::DirectionExchange> exchange;
  };
  const auto ready = std::make_shared<Ready>();
  ready->pending = detail::import_state(whole, view());
  const auto settings = detail::check_pending(ready->pending, view());
  ready->exchange = make_exchange(settings);
  if (!errors.empty()) {
    require(
        ready->exchange != nullptr,
        "the state to load has errors of a 1-bit exchange, but this rank exchanges nothing; resume through "
        "join_rank_states");
    errors = detail::errors_of_rank(ready->exchange->route(), std::move(errors));
    const int64_t version = detail::errors_version(errors);
    detail::remove_marks(errors);
    ready->exchange->load_errors(errors, version);
    detail::require_all_loaded(errors,
                               "\", which fits no matrix of this OneBitMuon; build the same parameters");
  }
  return [this, ready] {
    commit(ready->pending);
    engine().exchange_directions(std::move(ready->exchange));
    across_ranks_->forget();
    failure_.clear();
  };
}

void OneBitMuon::require_one_file(const char* what) const {
  require(local_parameters().empty(), kName, " cannot be ", what,
          " one archive, because each rank has a momentum and errors of its own; use the Checkpoints of a "
          "Session, "
          "or export_state and export_rank_state");
}
void OneBitMuon::save(torch::serialize::OutputArchive& archive) const {
  require_one_file("saved to");
  FusedOptimizer::save(archive);
}
void OneBitMuon::load(torch::serialize::InputArchive& archive) {
  require_one_file("loaded from");
  FusedOptimizer::load(archive);
}

}  // namespace pacer
