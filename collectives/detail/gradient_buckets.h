// Where each gradient lies: parameters of one dtype, in a given order, cut into flat buckets. No
// communication here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace pacer::detail {

struct BucketedParameter {
  std::string name;
  at::Tensor parameter;
  bool may_stay_local = false;  // such parameters share buckets with their like only
  size_t bucket = 0;
  at::Tensor view;  // of the bucket, in the parameter's shape and memory order
};

struct Bucket {
  at::Tensor flat;                 // the gradients' dtype
  at::Tensor wire;                 // undefined where flat itself travels
  std::vector<size_t> parameters;  // positions in the list of parameters
};

// Fills bucket and view of every parameter. `order`: positions in the order in which their gradients become
// ready. Memory is not initialised. Buckets are numbered in the order in which they fill.
std::vector<Bucket> make_buckets(std::vector<BucketedParameter>& parameters, const std::vector<size_t>& order,
                                 int64_t bucket_bytes, int64_t first_bucket_bytes);

}  // namespace pacer::detail
