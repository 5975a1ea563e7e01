#include <pacer/optimizers/detail/joint_look.h>

#include <ATen/ops/empty.h>

#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/kernels/norm.h>
#include <pacer/kernels/onebit_adam.h>

namespace pacer::detail {
namespace {

// One number of each worker, on this rank's device.
at::Tensor of_workers(const OneBitRoute& route, const at::Tensor& own) {
  const int64_t workers = route.workers();
  if (workers == 1) return own;
  Communicator& replicas = route.replicas();
  const at::Tensor all = at::empty({replicas.world_size()}, own.options());
  const auto agreed = CollectiveOptions().agreed(true);
  (own.is_cuda() ? replicas.all_gather(all, own, agreed) : replicas.all_gather_host(all, own)).wait();
  return all.view({workers, -1}).select(1, 0).contiguous();  // the ranks of a worker have the same
}

}  // namespace

void add_partials(at::Device device, const double* partials, int64_t count, double* sum) {
  if (device.is_cuda()) return kernels::sum_partials_cuda(partials, count, sum, current_stream(device));
  *sum = sum_partials(partials, count);
}

void look_jointly(GradientGuard& guard, const at::Tensor& sums, const OneBitRoute* route, double local_weight,
                  const double* averaged, int64_t count) {
  sums.narrow(0, 0, 1).zero_();
  auto* of_others = sums.mutable_data_ptr<double>();
  double* total = of_others + 1;
  const at::Tensor own = sums.narrow(0, 2, 1);
  const int64_t workers = route == nullptr ? 1 : route->workers();
  const at::Tensor all = route == nullptr ? own : of_workers(*route, own);
  const double weight = local_weight / static_cast<double>(workers);
  const at::Device device = sums.device();
  if (count > 0) add_partials(device, averaged, count, of_others);
  if (device.is_cuda()) {
    kernels::joint_sum_of_squares_cuda(all.const_data_ptr<double>(), workers, weight, of_others, total,
                                       current_stream(device));
  } else {
    *total = kernels::joint_sum_of_squares(all.const_data_ptr<double>(), workers, weight, *of_others);
  }
  guard.look(total, 1);
}

}  // namespace pacer::detail
