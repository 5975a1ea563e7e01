#include <pacer/collectives/detail/agreement_message.h>

#include <cstring>

#include <c10/core/ScalarType.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

std::string describe_call(const CallRecord& call) {
  std::string text = concatenate("calls ", call.operation, " number ", call.number);
  if (call.elements >= 0) text += concatenate(" of ", call.elements, " elements");
  if (call.tensors != 1 || (call.list != 0 && call.dtype >= 0)) {
    return concatenate(text, " in ", call.tensors, " tensors, dtypes and sizes number ", call.list);
  }
  if (call.dtype < 0) return text;
  text += concatenate(" of ", c10::toString(static_cast<c10::ScalarType>(call.dtype)));
  if (std::strcmp(call.operation, "broadcast") == 0) text += concatenate(" from rank ", call.root);
  return text;
}

std::string describe_status(const RankStatus& status) {
  const std::string after = concatenate(" after step ", status.step);
  switch (status.intent) {
    case Intent::agree:
      return "compares set-ups" + after;
    case Intent::step:
      return concatenate("takes a step of ", status.micro_steps, " micro-steps", after);
    case Intent::micro_step:
      return concatenate("takes a micro-step of ", status.micro_steps, after);
    case Intent::last_step:
      return concatenate("ends with a window of ", status.micro_steps, " micro-steps", after);
    case Intent::finish:
      return "has no more data" + after;
    case Intent::save:
      return "saves a checkpoint" + after;
    case Intent::load:
      return "loads a checkpoint";
  }
  return "does something unknown" + after;
}

}  // namespace

bool is_call(const void* message) {
  int64_t kind;
  std::memcpy(&kind, message, sizeof kind);
  return kind == kCallMessage;
}

std::string describe_agreement(const void* message) {
  if (is_call(message)) {
    CallRecord call;
    std::memcpy(&call, message, sizeof call);
    call.operation[sizeof(call.operation) - 1] = '\0';  // whatever arrived
    return describe_call(call);
  }
  RankStatus status;
  std::memcpy(&status, message, sizeof status);
  return describe_status(status);
}

}  // namespace pacer::detail
