// The text in which bitsandbytes keeps what the codes of a weight in 4 bits mean.
#include <pacer/checkpoints/detail/quant_state.h>

#include "fuzz/harness.h"

namespace pacer::fuzz {
namespace {

using detail::QuantState;

QuantState parsed(const std::string& text) { return detail::parse_quant_state(text, "a quant_state"); }

}  // namespace

std::vector<std::string> seeds() {
  QuantState state;
  state.dtype = at::kBFloat16;
  state.shape = {64, 128};
  const std::string plain = detail::quant_state_text(state, "a");
  state.nested = true;
  state.offset = 0.0625F;
  return {plain, detail::quant_state_text(state, "a")};
}

}  // namespace pacer::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pacer;
  const std::string text = fuzz::text_of(data, size);
  fuzz::QuantState state;
  // Beside the text there are the parser's own copies of it and of its strings.
  if (!fuzz::accepts(2 * size, [&] { state = fuzz::parsed(text); })) return 0;
  const fuzz::QuantState again = fuzz::parsed(detail::quant_state_text(state, "a"));
  fuzz::demand(again.dtype == state.dtype && again.shape == state.shape && again.nested == state.nested &&
                   again.offset == state.offset,
               "a state differs after it was written and read again");
  return 0;
}
