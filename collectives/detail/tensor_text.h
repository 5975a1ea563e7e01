// What ranks compare of a tensor without its values.
#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

// "Float [4, 3]", and where elements do not lie in memory row by row, their strides: "Float [4, 3], strides
// [1, 4]". Dimensions of size 1, whose strides mean nothing, have the stride 1.
std::string tensor_text(const at::Tensor& tensor);

}  // namespace pacer::detail
