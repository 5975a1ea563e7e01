// The gradient norm and the finite check in one read of the gradients: sums of squares in the order that
// core/reduction_order.h defines, so that CPU and GPU agree to the bit. A non-finite unit sum (a NaN or
// infinity among its elements, or an overflow of the sum of squares) counts as a non-finite gradient.
#pragma once

#include <cstdint>

#include <pacer/core/reduction_order.h>
#include <pacer/core/tile.h>
#include <pacer/kernels/adam.h>
#include <pacer/kernels/math/gradient_guard.h>
#include <pacer/kernels/stream.h>

namespace pacer::kernels {

// The dtype of a gradient.
enum class GradientType : uint32_t { f64, f32, bf16, f16 };

// Sum of squares of `count` (1 ... kReductionUnit) elements; fp32 inside the unit (fp64 for f64).
// Single-threaded.
double sum_of_squares_cpu(GradientType type, const void* elements, int64_t count);

// The same for the sum of magnitudes of fp32 elements.
double sum_of_magnitudes_cpu(const float* elements, int64_t count);

// Adds the partials in order and applies guard_step.
void finish_check_cpu(const double* partials, int64_t count, const GuardRule& rule, GradientCheck* check);
// *factor = early_factor of the same arguments.
void early_factor_cpu(const double* sum_of_squares, double local_weight, double workers,
                      const GuardRule& rule, const GradientCheck* check, double* factor);

// ---- CUDA: every pointer is device memory, work is enqueued on `stream`, nothing synchronises. ----

// partials[i], or where there are places partials[places[i]] = sum of squares of units[i], tiles of at most
// kReductionUnit elements that start on multiples of it; 0 where the tensor's gradient is null. `longest`: no
// unit has more elements; many short ones are faster where it is at most kReductionColumns.
void sum_of_squares_cuda(GradientType type, const Tile* units, int64_t count, const AdamGradient* gradients,
                         const uint32_t* places, double* partials, Stream stream,
                         int64_t longest = kReductionUnit);
// partials[i] = sum of magnitudes of units[i] of fp32 arrays, which stand where gradients do.
void sum_of_magnitudes_cuda(const Tile* units, int64_t count, const AdamGradient* arrays, double* partials,
                            Stream stream);
// *sum = sum_partials(partials, count).
void sum_partials_cuda(const double* partials, int64_t count, double* sum, Stream stream);
// Does what finish_check_cpu does. The rule lies on the device, so that a captured launch follows its
// changes.
void finish_check_cuda(const double* partials, int64_t count, const GuardRule* rule, GradientCheck* check,
                       Stream stream);
void early_factor_cuda(const double* sum_of_squares, double local_weight, double workers,
                       const GuardRule* rule, const GradientCheck* check, double* factor, Stream stream);

}  // namespace pacer::kernels
