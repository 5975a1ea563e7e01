#include <pacer/collectives/gradient_bucketer.h>

#include <utility>

#include <pacer/collectives/detail/gradient_bucketer_state.h>
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

void GradientBucketer::begin_backward(const std::vector<at::Tensor>& zero,
                                      const std::vector<at::Tensor>& done) {
  state_->begin(zero, done);
}
void GradientBucketer::end_backward() { state_->end(); }
void GradientBucketer::reduce(const std::vector<at::Tensor>& zero) { state_->reduce(zero); }
void GradientBucketer::wait() { state_->wait(); }
void GradientBucketer::drop() { state_->drop(); }
void GradientBucketer::on_arrival(Arrived f) { state_->on_arrival_ = std::move(f); }
void GradientBucketer::set_scope(GradientScope scope) { state_->set_scope(scope); }
double GradientBucketer::scale() const { return state_->prescale_; }
void GradientBucketer::use_order(const std::vector<int64_t>& order) { state_->use_order(order); }
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
