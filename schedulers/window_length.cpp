#include <pacer/schedulers/window_length.h>

#include <utility>

#include <pacer/core/error.h>
#include <pacer/hooks/session_parts.h>
#include <pacer/hooks/step_report.h>

namespace pacer {

WindowLength::WindowLength(AttentionWindow window, LengthSchedule schedule)
    : window_(std::move(window)), schedule_(std::move(schedule)) {
  schedule_.validate();
}

// A hook moves before a Session has it; the window stays a copy of the handle in both.
WindowLength::WindowLength(WindowLength&& other) noexcept
    : window_(other.window_),
      schedule_(std::move(other.schedule_)),
      parts_(std::exchange(other.parts_, nullptr)),
      trains_(other.trains_),
      asked_before_(other.asked_before_),
      has_trained_(other.has_trained_),
      length_(other.length_) {}

WindowLength::~WindowLength() {
  if (parts_ == nullptr) return;
  window_.set_length(std::nullopt);
  window_.leave_session();
}

std::string WindowLength::agreement() const {
  return (window_.form() == WindowForm::blocks ? "in blocks, " : "sliding, ") + schedule_.describe();
}

void WindowLength::attach(SessionParts& parts) {
  window_.enter_session();
  parts_ = &parts;
}

void WindowLength::begin(const Progress& /*progress*/, MicroBatch& /*batch*/) { trains_ = true; }

void WindowLength::forward_begin(const Progress& progress) {
  if (!trains_ || parts_->evaluations > 0) return;
  if (!std::exchange(has_trained_, true)) asked_before_ = window_.times_asked();
  length_ = schedule_.length(progress);
  window_.set_length(length_);
}

void WindowLength::forward_end() { window_.set_length(std::nullopt); }

void WindowLength::gradients_ready(const Progress& progress) {
  if (window_.times_asked() > asked_before_) return;
  Progress window = progress;
  window.micro_step = 0;
  // A stage of a pipeline may have no attention, and a window of micro-batches may have had all of it dropped.
  require(parts_->replicas || !parts_->unused(window).empty(),
          "the model has not asked this AttentionWindow for its length, so attention would see all of the "
          "sequence; in the model's forward write y = window.attend(q, k, v), or give the window to "
          "TransformerLayerOptions");
}

void WindowLength::after_step(StepReport& report) {
  trains_ = false;
  report.add("window", static_cast<double>(length_));
}

}  // namespace pacer
