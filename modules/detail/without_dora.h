// What layers say that take adapters, but none of DoRA.
#pragma once

namespace pacer::detail {

// The end of a sentence, for LoraLayer::why_no_adapter.
inline constexpr const char* kWithoutDora =
    "takes no adapter with LoraOptions::dora, which is for pacer::modules::Linear; leave it out of the "
    "targets";

}  // namespace pacer::detail
