// Adam with its moments in 8 bits (math/moment_codes.h): the update, which decodes and encodes them in the same pass over
// memory, and the conversion of whole tensors.
#pragma once

#include <cstdint>

#include <pacer/kernels/adam.h>

namespace pacer::kernels {

// Elements that share a scale.
constexpr int64_t kMomentGroup = 32;

// The loops of the rule, for every AdamStorage but f64, without amsgrad. In AdamTensor exp_avg has int8 codes, exp_avg_sq
// has uint8 codes, and both have fp16 scales. Tiles begin at multiples of kMomentGroup. In fp32: 16.25 bytes moved a parameter.
extern const UpdateLoops kAdam8BitUpdate;
// Its loop for GPUs.
void adam_8bit_cuda(AdamLaunch launch, const AdamTiles& tiles, const AdamTensor* tensors,
                    const AdamGradient* gradients, const StepScalars* scalars, Stream stream);

// Which of the two moments: each has codes of its own.
enum class Moment { first, second };

// The codes and scales of `count` moments, and back. There are ceil(count / kMomentGroup) scales, the bits of fp16
// numbers. Codes are int8 for the first moment and uint8 for the second. Single-threaded.
void encode_moments_cpu(Moment moment, const float* values, int64_t count, void* codes, uint16_t* scales);
void decode_moments_cpu(Moment moment, const void* codes, const uint16_t* scales, int64_t count,
                        float* values);

}  // namespace pacer::kernels
