#include <pacer/optimizers/adam_param_state.h>

#include <torch/serialize/archive.h>

#include <pacer/core/error.h>
#include <pacer/optimizers/detail/step_clock.h>

namespace pacer {
namespace {

// Undefined tensors are left out, as LibTorch's optimizers do. A state tensor is a view into a larger arena;
// the copy keeps the archive from storing the whole arena for each.
void write_tensor(torch::serialize::OutputArchive& archive, const char* key, const torch::Tensor& tensor) {
  if (tensor.defined()) archive.write(key, c10::IValue(tensor.clone()));
}

torch::Tensor read_tensor(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  return archive.try_read(key, value) ? value.toTensor() : torch::Tensor();
}

bool same_tensor(const torch::Tensor& a, const torch::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || a.equal(b));
}

}  // namespace

FusedAdamStateFields::FusedAdamStateFields(const FusedAdamStateFields& other)
    : exp_avg_(other.exp_avg_),
      exp_avg_sq_(other.exp_avg_sq_),
      max_exp_avg_sq_(other.max_exp_avg_sq_),
      master_(other.master_),
      remainder_(other.remainder_),
      trust_average_(other.trust_average_),
      steps_(other.step()) {}

FusedAdamStateFields& FusedAdamStateFields::operator=(const FusedAdamStateFields& other) {
  if (this != &other) *this = FusedAdamStateFields(other);
  return *this;
}

int64_t FusedAdamStateFields::step() const { return clock_ ? clock_->read() : steps_; }

FusedAdamStateFields& FusedAdamStateFields::step(int64_t steps) {
  require(steps >= 0, "a step count must be >= 0, not ", steps);
  steps_ = steps;
  clock_.reset();
  return *this;
}

bool operator==(const FusedAdamStateFields& left, const FusedAdamStateFields& right) {
  return left.step() == right.step() && same_tensor(left.exp_avg(), right.exp_avg()) &&
         same_tensor(left.exp_avg_sq(), right.exp_avg_sq()) &&
         same_tensor(left.max_exp_avg_sq(), right.max_exp_avg_sq()) &&
         same_tensor(left.master(), right.master()) && same_tensor(left.remainder(), right.remainder()) &&
         same_tensor(left.trust_average(), right.trust_average());
}

void FusedAdamStateFields::serialize(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step()));
  write_tensor(archive, "exp_avg", exp_avg());
  write_tensor(archive, "exp_avg_sq", exp_avg_sq());
  write_tensor(archive, "max_exp_avg_sq", max_exp_avg_sq());
  write_tensor(archive, "master", master());
  write_tensor(archive, "remainder", remainder());
  write_tensor(archive, "trust_average", trust_average());
}

void FusedAdamStateFields::serialize(torch::serialize::InputArchive& archive) {
  c10::IValue steps;
  require(archive.try_read("step", steps) && steps.isInt(), "the archive has no step count for a parameter");
  step(steps.toInt());
  exp_avg(read_tensor(archive, "exp_avg"));
  exp_avg_sq(read_tensor(archive, "exp_avg_sq"));
  max_exp_avg_sq(read_tensor(archive, "max_exp_avg_sq"));
  master(read_tensor(archive, "master"));
  remainder(read_tensor(archive, "remainder"));
  trust_average(read_tensor(archive, "trust_average"));
}

}  // namespace pacer
