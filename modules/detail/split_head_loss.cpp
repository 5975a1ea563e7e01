#include <pacer/modules/detail/split_head_loss.h>

#include <limits>
#include <utility>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

#include <pacer/core/error.h>
#include <pacer/modules/detail/head_loss.h>
#include <pacer/modules/detail/node_state.h>
#include <pacer/modules/detail/product.h>

namespace pacer::detail {
namespace {

using modules::HeadExchange;
using Options = modules::LinearCrossEntropyOptions;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct RowLosses {
  at::Tensor losses, lse;  // fp32 [rows]
};

// The rows of all ranks, one rank's behind the other's.
class AllRows {
 public:
  AllRows(HeadExchange& exchange, const LossInput& input, int64_t all_columns, const Options& options)
      : exchange_(exchange), columns_(input.columns), all_columns_(all_columns), options_(options) {
    hidden_ = exchange.compare_and_gather(input.hidden);
    rows_.targets = exchange.all_gather(input.rows.targets);
    const at::Tensor counts = exchange.all_gather(input.rows.count(options.ignore_index()).reshape({1}));
    divisor_ = counts.mean();
    divisor_ = divisor_ + divisor_.eq(0);
    // A rank's loss is the mean of its own rows. What is made here is the sum over all, whose gradients are divided by one
    // number, so that they stay in the range of fp16.
    const at::Tensor of_rank = divisor_ / (counts + counts.eq(0));
    const at::Tensor ones = at::ones({input.hidden.size(0)}, counts.options());
    const bool has_weights = input.rows.weights.defined();
    rows_.weights = exchange.all_gather(has_weights ? input.rows.weights : ones);
    rows_.weights = rows_.weights * of_rank.repeat_interleave(input.hidden.size(0));
  }

  const at::Tensor& divisor() const { return divisor_; }

  // What this rank makes for the rows of all: their losses, its terms of the hidden states' gradients, and the gradient of its
  // columns.
  LossSum sum(bool for_hidden, bool for_weight) const {
    // The same on all ranks, which may have different numbers of columns.
    const int64_t chunk_columns = (all_columns_ + exchange_.ranks() - 1) / exchange_.ranks();
    const auto make = [&](const at::Tensor& logits, const LossRows& rows, const at::Tensor& losses,
                          const at::Tensor& codes) {
      const RowLosses made = losses_of(logits, rows);
      losses.copy_(made.losses);
      if (for_hidden || for_weight) make_gradients(logits, rows, made.lse, codes);
    };
    return loss_sum(hidden_, columns_, rows_, options_, chunk_columns, for_hidden, for_weight, make);
  }

 private:
  kernels::CrossEntropy work_of(const at::Tensor& logits, const LossRows& rows) const {
    kernels::CrossEntropy work = cross_entropy_of(logits, rows, options_);
    work.first_column = exchange_.first_column();
    work.all_columns = all_columns_;
    return work;
  }

  // Of whole rows, each before its weight: terms of the sums from every rank, of which only one has the target.
  RowLosses losses_of(const at::Tensor& logits, const LossRows& rows) const {
    const int64_t count = logits.size(0);
    const at::Tensor own = at::empty({count, 4}, rows.weights.options());
    kernels::CrossEntropy work = work_of(logits, rows);
    work.terms = own.mutable_data_ptr<float>();
    run_cross_entropy(work, logits.device());
    const at::Tensor terms = exchange_.all_gather(own).view({exchange_.ranks(), count, 4});
    const at::Tensor largest = terms.select(2, 0), most = largest.amax(0);
    const at::Tensor lse = most + (terms.select(2, 1) * (largest - most).exp()).sum(0).log();
    at::Tensor losses = lse - (1 - options_.label_smoothing()) * terms.select(2, 2).sum(0);
    if (options_.label_smoothing() != 0) {
      losses -= options_.label_smoothing() / static_cast<double>(all_columns_) * terms.select(2, 3).sum(0);
    }
    if (options_.z_loss() != 0) losses += options_.z_loss() * lse.square();
    const at::Tensor is_none = rows.targets.lt(0).logical_or_(rows.targets.ge(all_columns_));
    losses.masked_fill_(is_none, kNaN);
    losses.masked_fill_(rows.targets.eq(options_.ignore_index()), 0);
    return {losses, lse};
  }

  void make_gradients(const at::Tensor& logits, const LossRows& rows, const at::Tensor& lse,
                      const at::Tensor& codes) const {
    kernels::CrossEntropy work = work_of(logits, rows);
    work.lse = lse.const_data_ptr<float>();
    work.wants_gradient = true;
    if (codes.defined()) work.codes = codes.mutable_data_ptr<uint8_t>();
    run_cross_entropy(work, logits.device());
  }

  HeadExchange& exchange_;
  const at::Tensor columns_;  // this rank's
  const int64_t all_columns_;
  const Options& options_;
  at::Tensor hidden_;
  LossRows rows_;
  at::Tensor divisor_;  // fp32 []
};

// The same number on every rank, or else NaN.
at::Tensor same_on_all(HeadExchange& exchange, const at::Tensor& factor) {
  const at::Tensor all = exchange.all_gather(factor);
  const at::Tensor differs = all.ne(all[0]).any();
  require(!factor.device().is_cpu() || !differs.item<bool>(),
          "the losses behind a head that ranks share out were scaled by different numbers, ", all,
          ", before backward; scale them alike on all ranks");
  return factor.masked_fill(differs, kNaN);
}

struct SplitHeadState : torch::CustomClassHolder {
  std::shared_ptr<HeadExchange> exchange;
  LossRows rows;
  Options options;
  at::ScalarType weight_type = at::kFloat;
  bool for_hidden = false, for_weight = false;
};

struct SplitHeadNode : torch::autograd::Function<SplitHeadNode>, FusedNode<SplitHeadState> {
  // `weight` is here for the graph only: its gradient goes to the exchange.
  static at::Tensor forward(Context* context, StatePtr state, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& columns) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    HeadExchange& exchange = *state->exchange;
    const AllRows all(exchange, {hidden, columns, state->rows}, weight.size(0), state->options);
    LossSum sum = all.sum(state->for_hidden, state->for_weight);
    if (state->for_hidden) sum.hidden = exchange.reduce_scatter(sum.hidden);
    const int64_t count = hidden.size(0);
    at::Tensor losses = sum.losses.narrow(0, exchange.rank() * count, count);
    if (state->rows.weights.defined()) losses = losses * state->rows.weights;
    at::Tensor loss = losses.sum() / state->rows.count(state->options.ignore_index());
    keep(context, std::move(state), {std::move(sum.hidden), std::move(sum.weight), all.divisor()});
    return loss;
  }

  static Tensors backward(Context* context, const Tensors& gradients) {
    refuse_second_derivative();
    if (!gradients[0].defined()) return Tensors(4);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const StatePtr state = state_of(context);
    const Tensors kept = context->get_saved_variables();
    const at::Tensor above = same_on_all(*state->exchange, gradients[0].to(at::kFloat).reshape({1}));
    const at::Tensor factor = above / kept[2];
    if (kept[1].defined()) {
      state->exchange->add_gradient(scaled_gradient(kept[1], factor, state->weight_type));
    }
    Tensors result(4);
    if (kept[0].defined()) result[1] = scaled_gradient(kept[0], factor, kept[0].scalar_type());
    return result;
  }
};

}  // namespace

at::Tensor split_head_loss(const std::shared_ptr<HeadExchange>& exchange, const at::Tensor& hidden,
                           const at::Tensor& weight, const at::Tensor& targets, const Options& options,
                           const at::Tensor& row_weights) {
  const LossInput input =
      checked_loss_input(hidden, weight, exchange->columns(), targets, options, row_weights);
  auto state = c10::make_intrusive<SplitHeadState>();
  state->exchange = exchange;
  state->rows = input.rows;
  state->options = options;
  state->weight_type = weight.scalar_type();
  state->for_hidden = at::GradMode::is_enabled() && input.hidden.requires_grad();
  state->for_weight = at::GradMode::is_enabled() && exchange->is_trained();
  return SplitHeadNode::apply(std::move(state), input.hidden, weight, input.columns);
}

}  // namespace pacer::detail
