#include <pacer/modules/attention_window.h>

#include <limits>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/stream.h>
#include <pacer/modules/detail/attention.h>
#include <pacer/modules/replayed.h>

namespace pacer {

struct AttentionWindow::State {
  WindowForm form;
  std::optional<int64_t> length;
  int64_t times_asked = 0;
  bool is_in_session = false;
  // The mask that was made last, and the window that it is for.
  at::Tensor mask;
  std::optional<int64_t> of_length;
};

namespace {

// Returns the positions that take part, bool [sequence, sequence].
at::Tensor allowed_positions(int64_t sequence, std::optional<int64_t> window, WindowForm form,
                             const at::Device& device) {
  const at::Tensor positions = at::arange(sequence, at::TensorOptions().dtype(at::kLong).device(device));
  const at::Tensor queries = positions.unsqueeze(1), keys = positions.unsqueeze(0);
  const at::Tensor causal = keys.le(queries);
  if (!window) return causal;
  if (form == WindowForm::sliding) return causal.logical_and(keys.gt(queries.sub(*window)));
  const at::Tensor block = at::floor_divide(positions, *window);
  return causal.logical_and(block.unsqueeze(1).eq(block.unsqueeze(0)));
}

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout_p) {
  return detail::attention(q, k, v, /*mask=*/{}, dropout_p, /*is_causal=*/true);
}

void refuse_capture(const at::Device& device) {
  require<Error>(
      !device.is_cuda() || !detail::is_capturing(device),
      "an AttentionWindow that is shorter than the sequence would stay as it is in every replay of "
      "a captured CUDA graph; capture once the window has its full length, or leave the forward pass "
      "outside");
}

// Turns the pieces of w tokens into a batch of their own; what is left at the end is a shorter piece.
at::Tensor attend_in_blocks(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t w,
                            double dropout_p) {
  const int64_t batch = q.size(0), sequence = q.size(2), pieces = sequence / w, whole = pieces * w;
  const auto in_pieces =
      [&](const at::Tensor& x) {  // [batch, heads, sequence, c] -> [batch * pieces, heads, w, c]
        return x.narrow(2, 0, whole).unflatten(2, {pieces, w}).transpose(1, 2).flatten(0, 1);
      };
  const auto rest = [&](const at::Tensor& x) { return x.narrow(2, whole, sequence - whole); };
  const at::Tensor of_pieces = causal_attention(in_pieces(q), in_pieces(k), in_pieces(v), dropout_p);
  const at::Tensor y = of_pieces.unflatten(0, {batch, pieces}).transpose(1, 2).flatten(2, 3);
  if (whole == sequence) return y;
  return at::cat({y, causal_attention(rest(q), rest(k), rest(v), dropout_p)}, 2);
}

}  // namespace

AttentionWindow::AttentionWindow(WindowForm form) : state_(std::make_shared<State>()) { state_->form = form; }

WindowForm AttentionWindow::form() const { return state_->form; }

std::optional<int64_t> AttentionWindow::length() const {
  ++state_->times_asked;
  return replayed(state_.get(), state_->length);
}

void AttentionWindow::set_length(std::optional<int64_t> length) {
  require(!length || *length >= 1, "the length of an AttentionWindow must be at least 1, not ",
          length.value_or(0), "; nothing at all stands for the whole sequence");
  state_->length = length;
}

at::Tensor AttentionWindow::mask(int64_t sequence, const at::TensorOptions& options) const {
  require(sequence >= 0, "AttentionWindow::mask was asked for a sequence of ", sequence, " tokens");
  const at::ScalarType dtype = options.has_dtype() ? c10::typeMetaToScalarType(options.dtype()) : at::kBool;
  require(dtype == at::kBool || c10::isFloatingType(dtype),
          "AttentionWindow::mask makes masks of bool and of floating point, not of ", dtype);
  std::optional<int64_t> window = length();
  if (window && *window >= sequence) window = std::nullopt;
  State& state = *state_;
  // LibTorch names the current GPU without a number.
  const at::Device device = at::zeros({0}, at::TensorOptions().device(options.device())).device();
  if (window) refuse_capture(device);
  const at::Tensor& kept = state.mask;
  if (kept.defined() && kept.size(0) == sequence && kept.scalar_type() == dtype && kept.device() == device &&
      state.of_length == window) {
    return kept;
  }
  const c10::InferenceMode no_inference(false);  // a training may save for backward what an evaluation made
  at::Tensor mask = allowed_positions(sequence, window, state.form, device);
  if (dtype != at::kBool) {
    mask = at::zeros({sequence, sequence}, at::TensorOptions().dtype(dtype).device(device))
               .masked_fill_(mask.logical_not(), -std::numeric_limits<double>::infinity());
  }
  state.mask = mask;
  state.of_length = window;
  return mask;
}

at::Tensor AttentionWindow::attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   double dropout_p) const {
  require(q.dim() == 4 && k.dim() == 4 && v.dim() == 4,
          "AttentionWindow::attend takes [batch, heads, sequence, channels], not ", q.sizes(), ", ",
          k.sizes(), " and ", v.sizes());
  const int64_t sequence = q.size(2);
  require(k.size(2) == sequence && v.size(2) == sequence,
          "AttentionWindow::attend takes queries, keys and values of one sequence, not of ", sequence, ", ",
          k.size(2), " and ", v.size(2), " tokens; use mask() with scaled_dot_product_attention for others");
  const std::optional<int64_t> window = length();
  if (!window || *window >= sequence) return causal_attention(q, k, v, dropout_p);
  if (state_->form == WindowForm::sliding) {
    return detail::attention(q, k, v, mask(sequence, q.options().dtype(at::kBool)), dropout_p,
                             /*is_causal=*/false);
  }
  refuse_capture(q.device());
  return attend_in_blocks(q, k, v, *window, dropout_p);
}

int64_t AttentionWindow::times_asked() const { return state_->times_asked; }

void AttentionWindow::enter_session() {
  require(!state_->is_in_session,
          "this AttentionWindow is in use by another Session; use one AttentionWindow per model");
  state_->is_in_session = true;
}

void AttentionWindow::leave_session() { state_->is_in_session = false; }

}  // namespace pacer
