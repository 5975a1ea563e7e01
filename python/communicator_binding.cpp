#include "communicator_binding.h"

#include <chrono>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <pacer/collectives/launch_environment.h>
#include <pacer/compression/compressed_all_reduce.h>
#include <pacer/core/error.h>

namespace pacer::python {
namespace {

using Held = c10::intrusive_ptr<PythonCommunicator>;

CommunicatorOptions make_options(const std::string& backend, int64_t gpu, int64_t ranks_per_node,
                                 double timeout) {
  const std::chrono::duration<double> seconds(timeout);
  CommunicatorOptions options;
  options.backend(backend == "nccl" ? CommunicatorBackend::nccl : CommunicatorBackend::gloo)
      .timeout(std::chrono::duration_cast<std::chrono::milliseconds>(seconds));
  if (ranks_per_node != 0) options.ranks_per_node(static_cast<int>(ranks_per_node));
  if (gpu >= 0) options.gpu(gpu);
  return options;
}

class PythonCompressedAllReduce : public torch::CustomClassHolder {
 public:
  PythonCompressedAllReduce(const std::optional<Held>& communicator, at::Device device, int64_t size,
                            bool is_l1, bool block_scales, bool compress_alone, bool hierarchical)
      : mean_(communicator ? (*communicator)->world() : Communicator::alone(device), size,
              CompressionOptions()
                  .scale(is_l1 ? ScaleNorm::l1 : ScaleNorm::rms)
                  .block_scales(block_scales)
                  .compress_alone(compress_alone)
                  .hierarchical(hierarchical)) {}

  void reduce(const at::Tensor& buffer) { mean_.reduce(buffer); }
  at::Tensor worker_error() const { return mean_.worker_error(); }
  at::Tensor server_error() const { return mean_.server_error(); }
  void set_errors(const at::Tensor& worker, const at::Tensor& server) { mean_.set_errors(worker, server); }
  int64_t bytes_sent() const { return mean_.bytes_sent(); }

 private:
  CompressedAllReduce mean_;
};

// Of each line of the Communicator's traffic: phase, group and operation, beside calls and bytes.
std::vector<std::tuple<std::string, std::string, std::string, int64_t, int64_t>> traffic(const Held& self) {
  std::vector<std::tuple<std::string, std::string, std::string, int64_t, int64_t>> lines;
  for (const Traffic& line : self->world()->traffic()) {
    lines.emplace_back(line.phase, line.group, line.operation, line.calls, line.bytes_sent);
  }
  return lines;
}

// Which launcher started this process, and how many ranks; "" and 1 where none did, or where its variables
// contradict each other, of which whoever wants to join ranks will hear.
std::tuple<std::string, int64_t> launched() {
  try {
    const LaunchEnvironment launch = read_launch_environment();
    return {launch.launcher, launch.world_size};
  } catch (const InvalidArgument&) {
    return {"", 1};
  }
}

}  // namespace

PythonCommunicator::PythonCommunicator(const std::string& place, int64_t port, int64_t rank,
                                       int64_t world_size, const std::string& backend, int64_t gpu,
                                       int64_t ranks_per_node, double timeout) {
  const CommunicatorOptions options = make_options(backend, gpu, ranks_per_node, timeout);
  const int own = static_cast<int>(rank), all = static_cast<int>(world_size);
  world_ = port < 0 ? Communicator::from_file(place, own, all, options)
                    : Communicator::from_address(place, static_cast<int>(port), own, all, options);
}

void register_communicator(torch::Library& library) {
  library.def("launched", launched);
  library.class_<PythonCommunicator>("Communicator")
      .def(torch::init<const std::string&, int64_t, int64_t, int64_t, const std::string&, int64_t, int64_t,
                       double>())
      .def_static("alone",
                  [](at::Device device) {
                    return c10::make_intrusive<PythonCommunicator>(Communicator::alone(device));
                  })
      .def("backend", [](const Held& self) { return self->world()->backend_name(); })
      .def("device", [](const Held& self) { return self->world()->device(); })
      .def("ranks_per_node", [](const Held& self) -> int64_t { return self->world()->ranks_per_node(); })
      .def("bytes_sent", [](const Held& self) { return self->world()->bytes_sent(); })
      .def("traffic", traffic);
  library.class_<PythonCompressedAllReduce>("CompressedAllReduce")
      .def(torch::init<const std::optional<Held>&, at::Device, int64_t, bool, bool, bool, bool>())
      .def("reduce", &PythonCompressedAllReduce::reduce)
      .def("worker_error", &PythonCompressedAllReduce::worker_error)
      .def("server_error", &PythonCompressedAllReduce::server_error)
      .def("set_errors", &PythonCompressedAllReduce::set_errors)
      .def("bytes_sent", &PythonCompressedAllReduce::bytes_sent);
}

}  // namespace pacer::python
