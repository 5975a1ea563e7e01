// Memory that is not there, and says so to whoever asks for it.
#pragma once

#include <cstddef>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

namespace pacer::detail {

// Returns a storage of that many bytes without memory; whoever asks for its memory gets a c10::Error with
// this sentence.
c10::Storage refusing_storage(size_t bytes, c10::Device device, const std::string& sentence);

}  // namespace pacer::detail
