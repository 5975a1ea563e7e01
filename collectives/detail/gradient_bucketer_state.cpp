// Which gradient is in which bucket: what a GradientBucketer is made with, learns, and tells of it.
#include <pacer/collectives/detail/gradient_bucketer_state.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <pacer/collectives/detail/gradient_checks.h>
#include <pacer/collectives/detail/gradient_hook.h>
#include <pacer/core/error.h>

namespace pacer {
namespace {

void check_bucket_options(const BucketOptions& options) {
  const int64_t bytes = options.bucket_bytes().value_or(1);
  require(bytes >= 1, "gradient buckets need bucket_bytes >= 1, not ", bytes);
  require(options.first_bucket_bytes() >= 1, "gradient buckets need first_bucket_bytes >= 1, not ",
          options.first_bucket_bytes());
  const auto wire = options.wire_dtype();
  require(!wire || *wire == at::kBFloat16 || *wire == at::kFloat,
          "gradients travel as bf16, as fp32 or, with wire_dtype unset, as they are, not as ",
          wire ? *wire : at::kFloat);
}

}  // namespace

GradientBucketer::GradientBucketer(const std::vector<NamedParameter>& parameters,
                                   std::shared_ptr<Communicator> world, const BucketOptions& options,
                                   const std::vector<at::Tensor>& may_stay_local) {
  require(world != nullptr, "a GradientBucketer needs a Communicator");
  check_bucket_options(options);
  state_ = std::make_shared<State>(std::move(world), options);
  state_->add(parameters, may_stay_local);
}

GradientBucketer::~GradientBucketer() {
  for (const auto& entry : state_->parameters_) detail::remove_gradient_hook(entry.parameter, state_.get());
}

void GradientBucketer::State::add(const std::vector<NamedParameter>& parameters,
                                  const std::vector<at::Tensor>& may_stay_local) {
  for (const auto& [name, parameter] : parameters) {
    detail::check_reducible(name, parameter, *world_);
    if (!parameter.requires_grad() || positions_.count(parameter.unsafeGetTensorImpl())) continue;
    positions_.emplace(parameter.unsafeGetTensorImpl(), parameters_.size());
    const bool local = std::any_of(may_stay_local.begin(), may_stay_local.end(),
                                   [&it = parameter](const at::Tensor& other) { return other.is_same(it); });
    parameters_.push_back({name, parameter, local, {}});
    withheld_.add(name, parameter);
    if (parameter.scalar_type() == at::kHalf) prescale_ = 1.0 / world_->world_size();
  }
  // Backward finishes the last layers first.
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  build(order);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    detail::add_gradient_hook(parameters_[i].parameter, shared_from_this(),
                              [this, i](const at::Tensor&) { arrive(i); });
  }
}

void GradientBucketer::State::build(const std::vector<size_t>& order) {
  order_ = order;
  // Alike on all ranks. Gradients that are divided before they are added are not worth a way of their own.
  const bool in_place = options_.in_place().value_or(world_->coalesces()) && prescale_ == 1;
  const int64_t bytes = options_.bucket_bytes().value_or(detail::default_bucket_bytes(parameters_, in_place));
  buckets_ = detail::make_buckets(parameters_, order, bytes, options_.first_bucket_bytes());
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const size_t position : buckets_[b].parameters) gradients_.put(position, b);
  }
  if (in_place) return;
  for (detail::Bucket& bucket : buckets_) {
    detail::make_flat(bucket, parameters_);
    if (const auto wire = wire_dtype_of(bucket)) {
      bucket.wire = at::empty_like(bucket.flat, bucket.flat.options().dtype(*wire));
    }
  }
}

void GradientBucketer::State::renew_memory() {
  if (!memory_is_lent_) return;
  build(order_);
  memory_is_lent_ = false;
}

std::optional<at::ScalarType> GradientBucketer::State::wire_dtype_of(const detail::Bucket& bucket) const {
  const auto wire = options_.wire_dtype();
  return wire && bucket.dtype == at::kFloat && *wire != at::kFloat ? wire : std::nullopt;
}

int64_t GradientBucketer::State::bytes_of(const detail::Bucket& bucket) const {
  int64_t elements = bucket.elements;
  const auto wire = wire_dtype_of(bucket);
  if (!bucket.flat.defined() && !wire) {  // without padding
    elements = 0;
    for (const size_t position : bucket.parameters) elements += parameters_[position].parameter.numel();
  }
  return elements * static_cast<int64_t>(at::elementSize(wire.value_or(bucket.dtype)));
}

size_t GradientBucketer::State::position_of(const at::Tensor& parameter) const {
  const auto found = positions_.find(parameter.unsafeGetTensorImpl());
  return found == positions_.end() ? parameters_.size() : found->second;
}

// Rank 0's order for all. The gradients of this window stay in the old buckets until they are cleared.
void GradientBucketer::State::learn_order() {
  order_is_learned_ = true;
  for (size_t i = 0; i < parameters_.size(); ++i) {  // those that backward did not reach come last
    if (std::find(arrivals_.begin(), arrivals_.end(), i) == arrivals_.end()) arrivals_.push_back(i);
  }
  const at::Tensor order = at::empty({static_cast<int64_t>(arrivals_.size())}, at::kLong);
  auto* numbers = order.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < arrivals_.size(); ++i) numbers[i] = static_cast<int64_t>(arrivals_[i]);
  const at::Tensor all = at::empty({world_->world_size() * order.numel()}, at::kLong);
  world_->all_gather_host(all, order).wait();
  const auto* first = all.const_data_ptr<int64_t>();
  build({first, first + order.numel()});
}

void GradientBucketer::use_order(const std::vector<int64_t>& order) {
  std::vector<int64_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool is_permutation = sorted.size() == state_->parameters_.size();
  for (size_t i = 0; is_permutation && i < sorted.size(); ++i) {
    is_permutation = sorted[i] == static_cast<int64_t>(i);
  }
  require(is_permutation, "an order of gradient buckets must name each of the ", state_->parameters_.size(),
          " trained parameters once");
  require(!state_->active_ && state_->arrivals_.empty(),
          "GradientBucketer::use_order belongs before the first backward");
  state_->build({order.begin(), order.end()});
  state_->order_is_learned_ = true;
}

void GradientBucketer::set_scope(GradientScope scope) {
  const std::lock_guard<std::mutex> lock(state_->mutex_);
  require(!state_->active_, "GradientBucketer::set_scope belongs between windows");
  if (scope == GradientScope::node)
    state_->world_->node();  // made here, where all ranks are, and not in backward
  state_->scope_ = scope;
}

void GradientBucketer::on_arrival(Arrived f) { state_->on_arrival_ = std::move(f); }
double GradientBucketer::scale() const { return state_->prescale_; }
int64_t GradientBucketer::buckets_sent() const { return state_->sent_; }
int64_t GradientBucketer::buckets_sent_early() const { return state_->sent_early_; }

std::vector<int64_t> GradientBucketer::order() const {
  std::vector<int64_t> positions;
  if (state_->order_is_learned_) positions.assign(state_->order_.begin(), state_->order_.end());
  return positions;
}

std::vector<int64_t> GradientBucketer::bucket_bytes() const {
  std::vector<int64_t> bytes;
  for (const detail::Bucket& bucket : state_->buckets_) bytes.push_back(state_->bytes_of(bucket));
  return bytes;
}

std::vector<std::vector<std::string>> GradientBucketer::buckets() const {
  std::vector<std::vector<std::string>> names;
  for (const detail::Bucket& bucket : state_->buckets_) {
    names.emplace_back();
    for (const size_t position : bucket.parameters) {
      names.back().push_back(state_->parameters_[position].name);
    }
  }
  return names;
}

}  // namespace pacer
