#include <pacer/parallel/data_parallel.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/hooks/detail/model_facts.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/parallel/detail/touch_remedy.h>

namespace pacer {

std::string DataParallel::agreement() const {
  return detail::concatenate("buckets of ",
                             options_.bucket_bytes() ? std::to_string(*options_.bucket_bytes()) : "default",
                             " and ", options_.first_bucket_bytes(), " bytes, wire ",
                             options_.wire_dtype() ? c10::toString(*options_.wire_dtype()) : "as it is",
                             !options_.in_place()   ? ""
                             : *options_.in_place() ? ", in place"
                                                    : ", flat memory",
                             ", unused parameters ", options_.unused_is_zero() ? "are zero" : "are an error");
}

double DataParallel::join() {
  BucketOptions options = options_.buckets();
  options.touch_remedy(detail::kTouchRemedy);
  bucketer_.reset();  // gives its memory back before the next one takes as much
  const auto named = detail::named_optimizer_parameters(parts());
  SessionOptimizer* const optimizer = parts().session_optimizer();
  std::vector<at::Tensor> may_stay_local;
  if (optimizer) may_stay_local = optimizer->local_parameters();
  bucketer_ = std::make_unique<GradientBucketer>(named, parts().shared_world(), options, may_stay_local);
  if (optimizer && parts().has_guard()) {
    // A step begins with the norm of the gradients: each bucket's part of it is computed while later buckets are
    // still on their way.
    bucketer_->on_arrival(
        [optimizer](const std::vector<at::Tensor>& parameters) { optimizer->look_early(parameters); });
  }
  if (saved_order_.size() == detail::trained_parameters(parts()).size()) bucketer_->use_order(saved_order_);
  saved_order_.clear();
  return bucketer_->scale();
}

void DataParallel::begin_pass(const Progress& progress, bool is_last) {
  // In every pass, because the bucketer is another one where parameters have joined or left in between.
  if (parts().session_optimizer()) bucketer_->set_scope(parts().session_optimizer()->gradient_scope());
  if (!is_last) return;
  Progress window = progress;
  window.micro_step = 0;
  bucketer_->begin_backward(parts().unused(window), parts().unused(progress));
}

void DataParallel::end_pass(bool is_last) {
  if (is_last) bucketer_->end_backward();
}

void DataParallel::reduce(const Progress& window) { bucketer_->reduce(parts().unused(window)); }

void DataParallel::save(NamedTensors& state) const {
  const std::vector<int64_t> order = bucketer_ ? bucketer_->order() : saved_order_;
  const at::Tensor tensor = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), tensor.mutable_data_ptr<int64_t>());
  state["bucket_order"] = tensor;
}

void DataParallel::load(const NamedTensors& state) {
  const at::Tensor order = require_tensor(state, "bucket_order");
  require(order.scalar_type() == at::kLong && order.dim() == 1,
          "\"bucket_order\" of the checkpoint is no list of positions");
  const auto* positions = order.const_data_ptr<int64_t>();
  std::vector<int64_t> saved(positions, positions + order.numel()), sorted = saved;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    require(sorted[i] == static_cast<int64_t>(i), "\"bucket_order\" of the checkpoint is no permutation");
  }
  saved_order_ = std::move(saved);
}

}  // namespace pacer
