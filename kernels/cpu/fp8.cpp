// The CPU side of casts to 8-bit floats.
#include <pacer/kernels/fp8.h>

#include <algorithm>

#include <pacer/kernels/cpu/target.h>
#include <pacer/kernels/math/adam_storage.h>

namespace pacer::kernels {
namespace {

template <Fp8Format kFormat, class Element>
PACER_TARGET_CLONES void encode(const Element* x, int64_t count, float scale, uint8_t* codes) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) codes[i] = to_fp8<kFormat>(mul_(load(x[i]), scale));
}

template <class Element>
PACER_TARGET_CLONES uint32_t amax_of(const Element* x, int64_t count) {
  uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(load(x[i])));
  return largest;
}

template <class Element>
void cast_rows(const Fp8Cast& cast, int64_t begin, int64_t end) {
  const FullDenormals full_denormals;
  const auto* x = static_cast<const Element*>(cast.x) + begin * cast.columns;
  const int64_t count = (end - begin) * cast.columns;
  if (cast.amax != nullptr) *cast.amax = std::max(*cast.amax, amax_of(x, count));
  if (cast.codes == nullptr) return;
  uint8_t* codes = cast.codes + begin * cast.columns;
  cast.format == Fp8Format::e4m3 ? encode<Fp8Format::e4m3>(x, count, *cast.scale, codes)
                                 : encode<Fp8Format::e5m2>(x, count, *cast.scale, codes);
  if (cast.transposed == nullptr) return;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < cast.columns; ++column) {
      cast.transposed[column * cast.rows + row] = cast.codes[row * cast.columns + column];
    }
  }
}

}  // namespace

void fp8_cast_cpu(const Fp8Cast& cast, int64_t begin, int64_t end) {
  switch (cast.source) {
    case Fp8Source::f32:
      return cast_rows<float>(cast, begin, end);
    case Fp8Source::bf16:
      return cast_rows<BFloat16>(cast, begin, end);
    case Fp8Source::f16:
      return cast_rows<Float16>(cast, begin, end);
  }
}

}  // namespace pacer::kernels
