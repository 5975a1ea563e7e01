// Weights in 4 bits as bitsandbytes keeps them in files: of a layer X
//   X.weight                                   uint8 [elements / 2, 1], two a byte
//   X.weight.absmax                            fp32 [blocks of 64], or uint8 with double quantisation
//   X.weight.quant_map                         fp32 [16], what the codes mean
//   X.weight.nested_absmax, .nested_quant_map  fp32 [blocks of 256 scales], [256]; double quantisation only
//   X.weight.quant_state.bitsandbytes__nf4     uint8, the bytes of a JSON text: QuantState
#pragma once

#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace pacer::detail {

constexpr const char* kQuantStatePrefix = "quant_state.bitsandbytes__";
constexpr const char* kNf4QuantState = "quant_state.bitsandbytes__nf4";

struct QuantState {
  at::ScalarType dtype = at::kFloat;  // of the weight before
  std::vector<int64_t> shape;
  bool nested = false;  // with double quantisation
  float offset = 0;     // of scales then
};

// Throws InvalidArgument for a dtype that bitsandbytes does not decode to; `layer` is for messages.
std::string quant_state_text(const QuantState& state, const std::string& layer);

// Safe for any bytes. FileError for what is not such a text, InvalidArgument for another kind of quantisation
// than NF4 in blocks of 64 (of scales 256); `what` opens the messages.
QuantState parse_quant_state(std::string text, const std::string& what);

}  // namespace pacer::detail
