// What a Session's loop does instead of touching gradients that are being added up over ranks.
#pragma once

namespace pacer::detail {

inline constexpr const char* kTouchRemedy =
    "clip with the hook GradientClipping, read the norm from Session::gradient_norm(), and read or change "
    "gradients in gradients_ready() of a hook of your own, inside Session::step";

}  // namespace pacer::detail
