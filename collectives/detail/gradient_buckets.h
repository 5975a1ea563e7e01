// Where each gradient lies: parameters of one dtype, in a given order, cut into buckets, which are flat
// memory or lists of gradients that stay where backward puts them. No communication here.
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
  at::Tensor view;  // of flat memory, in the parameter's shape and memory order; undefined in place
};

struct Bucket {
  at::Tensor flat;                 // the gradients' dtype; undefined where they stay in place
  at::Tensor wire;                 // undefined where flat itself travels
  std::vector<size_t> parameters;  // positions in the list of parameters
  at::ScalarType dtype = at::kFloat;
  int64_t elements = 0;  // of flat memory: each gradient's are padded
};

// Returns the default of BucketOptions::bucket_bytes for these parameters.
int64_t default_bucket_bytes(const std::vector<BucketedParameter>& parameters, bool in_place);

// Clears the parameters' views. `order`: positions in the order in which their gradients become ready. Buckets are
// numbered in the order in which they fill.
std::vector<Bucket> make_buckets(std::vector<BucketedParameter>& parameters, const std::vector<size_t>& order,
                                 int64_t bucket_bytes, int64_t first_bucket_bytes);

// Gives the bucket flat memory, zeros, and its parameters their views.
void make_flat(Bucket& bucket, std::vector<BucketedParameter>& parameters);

// Makes a gradient fit for reduction where it lies while backward goes on: dense, in the parameter's dtype
// and memory order, in memory that nothing else refers to. What is not is replaced by a copy. That may differ
// from rank to rank: the values and their order in memory do not.
void make_own(at::Tensor& gradient, const at::Tensor& parameter);
// Zeros of the same kind.
at::Tensor zero_gradient(const at::Tensor& parameter);
// Its elements as one dimension, in the order in which they lie in memory. They lie without gaps.
at::Tensor flat_view(const at::Tensor& gradient);

}  // namespace pacer::detail
