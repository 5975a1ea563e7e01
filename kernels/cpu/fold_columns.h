// The last additions of a unit's sum in the order of core/reduction_order.h, on the CPU: from columns to one
// number.
#pragma once

namespace pacer::kernels {

// Fours of neighbouring columns, then halves on halves. kReductionColumns columns.
float fold_columns_cpu(const float* columns);
double fold_columns_cpu(const double* columns);

}  // namespace pacer::kernels
