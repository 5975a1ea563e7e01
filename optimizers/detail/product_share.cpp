#include <pacer/optimizers/detail/product_share.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/stack.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <pacer/collectives/agreement.h>
#include <pacer/collectives/detail/tensor_text.h>
#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// The sum of the bits of its elements, as integers, which no order of additions changes.
at::Tensor sum_of_bits(const at::Tensor& gradient) {
  const at::ScalarType as_integers = gradient.element_size() == 8   ? at::kLong
                                     : gradient.element_size() == 4 ? at::kInt
                                                                    : at::kShort;
  return gradient.detach().view(as_integers).sum(at::kLong);
}

// Of all gradients; 0 for one that is not there.
std::vector<int64_t> sums_of_bits(const std::vector<const ParameterEntry*>& matrices) {
  if (matrices.empty()) return {};
  std::vector<at::Tensor> sums;
  for (const ParameterEntry* matrix : matrices) {
    const at::Tensor& gradient = matrix->gradient();
    sums.push_back(gradient.defined() ? sum_of_bits(gradient)
                                      : at::zeros({}, matrix->parameter.options().dtype(at::kLong)));
  }
  const at::Tensor all = at::stack(sums).cpu();
  const auto* numbers = all.const_data_ptr<int64_t>();
  return {numbers, numbers + all.numel()};
}

}  // namespace

ProductShare::ProductShare(std::shared_ptr<Communicator> ranks)
    : ranks_(std::move(ranks)), loads_(static_cast<size_t>(ranks_->world_size())) {}

void ProductShare::forget() {
  std::fill(loads_.begin(), loads_.end(), 0.0);
  has_agreed_ = false;
}

std::vector<int64_t> ProductShare::deal(int64_t count, double cost) {
  const size_t ranks = loads_.size();
  std::vector<int64_t> counts(ranks, count / static_cast<int64_t>(ranks));
  for (int64_t left = count % static_cast<int64_t>(ranks); left > 0; --left) {
    // Nobody takes two of what is left over, and so the ranks stay close to each other.
    size_t least = ranks;
    for (size_t r = 0; r < ranks; ++r) {
      if (counts[r] == count / static_cast<int64_t>(ranks) && (least == ranks || loads_[r] < loads_[least]))
        least = r;
    }
    ++counts[least];
    loads_[least] += cost;
  }
  std::vector<int64_t> bounds = {0};
  for (const int64_t of_rank : counts) bounds.push_back(bounds.back() + of_rank);
  return bounds;
}

void ProductShare::agree(const std::vector<ParameterEntry>& entries, const std::vector<char>& taking_part) {
  if (has_agreed_) return;
  std::vector<const ParameterEntry*> matrices, with_whole_gradients;
  std::vector<Fact> facts;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!entries[i].muon) continue;
    matrices.push_back(&entries[i]);
    if (!entries[i].range.is_part()) with_whole_gradients.push_back(&entries[i]);
    facts.push_back(
        {concatenate("matrix ", entries[i].name),
         concatenate(tensor_text(entries[i].parameter), taking_part[i] ? "" : ", without a gradient")});
  }
  if (matrices.empty()) return;
  const std::vector<int64_t> sums = sums_of_bits(with_whole_gradients);
  for (size_t k = 0; k < sums.size(); ++k) {
    facts.push_back({concatenate("gradient of ", with_whole_gradients[k]->name,
                                 " (which ranks that share products average first)"),
                     concatenate("sum of bits ", sums[k])});
  }
  require_agreement(*ranks_, matrices.front()->state->step(), facts);
  has_agreed_ = true;
}

Work ProductShare::gather(const at::Tensor& values, const std::vector<int64_t>& bounds) const {
  const auto of_rank = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    return values.narrow(0, bounds[r], bounds[r + 1] - bounds[r]);
  };
  const at::Tensor own = of_rank(ranks_->rank());
  std::vector<Message> messages;
  for (int other = 0; other < ranks_->world_size(); ++other) {
    if (other == ranks_->rank()) continue;
    if (own.numel() > 0) messages.push_back(Message::send(own, other));
    if (of_rank(other).numel() > 0) messages.push_back(Message::receive(of_rank(other), other));
  }
  return messages.empty() ? Work() : ranks_->send_receive(messages);
}

}  // namespace pacer::detail
