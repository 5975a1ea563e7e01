#include <pacer/modules/with_head.h>

#include <pacer/modules/detail/split_head_loss.h>
#include <pacer/modules/head_exchange.h>

namespace pacer::modules {

WithHead::WithHead() : slot_(std::make_shared<HeadExchangeSlot>()) {}
WithHead::WithHead(const WithHead& /*other*/) : WithHead() {}
// Nothing is taken from the other. NOLINTNEXTLINE(bugprone-unhandled-self-assignment)
WithHead& WithHead::operator=(const WithHead& /*other*/) { return *this; }
WithHead::~WithHead() = default;

at::Tensor WithHead::head_loss(const at::Tensor& hidden, const at::Tensor& targets,
                               const LinearCrossEntropyOptions& options,
                               const at::Tensor& row_weights) const {
  const std::shared_ptr<HeadExchange>& exchange = slot_->exchange;
  if (exchange == nullptr || exchange->is_whole()) {
    return linear_cross_entropy(hidden, head_weight(), targets, options, row_weights);
  }
  return detail::split_head_loss(exchange, hidden, head_weight(), targets, options, row_weights);
}

}  // namespace pacer::modules
