// The classes torch.classes.pacer.Communicator and CompressedAllReduce. Where ranks meet is the package's
// choice, which lets the ranks of a process group of torch agree on it.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <torch/custom_class.h>
#include <torch/library.h>

#include <pacer/collectives/communicator.h>

namespace pacer::python {

class PythonCommunicator : public torch::CustomClassHolder {
 public:
  // `place`: a host where there is a port, else the path of a file. `gpu` and `port`: -1 for none.
  PythonCommunicator(const std::string& place, int64_t port, int64_t rank, int64_t world_size,
                     const std::string& backend, int64_t gpu, int64_t ranks_per_node, double timeout);
  explicit PythonCommunicator(std::shared_ptr<Communicator> world) : world_(std::move(world)) {}

  const std::shared_ptr<Communicator>& world() const { return world_; }

 private:
  std::shared_ptr<Communicator> world_;
};

void register_communicator(torch::Library& library);

}  // namespace pacer::python
