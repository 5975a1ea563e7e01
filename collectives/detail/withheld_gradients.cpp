#include <pacer/collectives/detail/withheld_gradients.h>

#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/core/error.h>
#include <pacer/device/detail/refusing_storage.h>

namespace pacer::detail {
namespace {

at::Tensor stand_in_for(const at::Tensor& parameter, const std::string& name, const std::string& remedy) {
  at::Tensor stand_in = at::empty({0}, parameter.options().requires_grad(false));
  c10::TensorImpl& impl = *stand_in.unsafeGetTensorImpl();
  impl.set_storage_keep_dtype(refusing_storage(
      parameter.nbytes(), parameter.device(),
      concatenate("the gradient of parameter ", name,
                  " is being added up over ranks since backward, and is there again once that is done; ",
                  remedy)));
  impl.set_sizes_and_strides(parameter.sizes(), parameter.strides());
  return stand_in;
}

}  // namespace

void WithheldGradients::add(const std::string& name, const at::Tensor& parameter) {
  entries_.push_back({name, parameter, {}, {}, false});
}

void WithheldGradients::withhold(size_t parameter) {
  Entry& entry = entries_[parameter];
  if (entry.is_withheld) return;
  if (!entry.stand_in.defined()) entry.stand_in = stand_in_for(entry.parameter, entry.name, remedy_);
  entry.gradient = std::exchange(entry.parameter.mutable_grad(), entry.stand_in);
  entry.is_withheld = true;
}

void WithheldGradients::withhold_all() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].parameter.grad().defined()) withhold(i);
  }
}

bool WithheldGradients::put_back(Entry& entry) {
  if (!std::exchange(entry.is_withheld, false)) return true;
  at::Tensor gradient = std::move(entry.gradient);
  at::Tensor& place = entry.parameter.mutable_grad();
  if (!place.is_same(entry.stand_in)) return false;
  place = std::move(gradient);
  return true;
}

void WithheldGradients::put_back() {
  for (Entry& entry : entries_) put_back(entry);
}

void WithheldGradients::give_back() {
  const Entry* changed = nullptr;
  for (Entry& entry : entries_) {
    if (!put_back(entry) && changed == nullptr) changed = &entry;
  }
  if (changed == nullptr) return;
  throw InvalidArgument(
      changed->parameter.grad().defined()
          ? concatenate("parameter ", changed->name,
                        " was given a gradient of its own after backward, which would be lost, because its "
                        "gradient is being added up over ranks; ",
                        remedy_)
          : concatenate(
                "the gradient of parameter ", changed->name,
                " was cleared while it was being added up over ranks; delete zero_grad() from between "
                "backward() and step()"));
}

}  // namespace pacer::detail
