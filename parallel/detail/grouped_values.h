// The values of parameters of which each rank keeps its part: those of a group come together before it is
// used, and leave afterwards. Not for several threads at once.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/collectives/communicator.h>
#include <pacer/parallel/detail/flat_pool.h>
#include <pacer/parallel/detail/unit_memory.h>

namespace pacer::detail {

class GroupedValues {
 public:
  GroupedValues(std::shared_ptr<Communicator> ranks, size_t groups)
      : ranks_(std::move(ranks)), groups_(groups) {}

  // Parameters of one dtype of a group, whose values are views of `flat`. They are released; returned is this
  // rank's part of the values, which is what the next gather sends.
  at::Tensor add(size_t group, std::vector<at::Tensor> parameters, const std::vector<std::string>& names,
                 const at::Tensor& flat);
  bool holds(size_t unit, size_t parameter) const { return units_[unit].memory.holds(parameter); }

  // Values that were asked for ahead of their use; gather() then only waits for them.
  void start(size_t group);
  // Returns when they are there; on CUDA the current stream waits.
  void gather(size_t group);
  void release(size_t group);
  void release_all();
  // Keeps no memory for the next ones.
  void forget_memory() { memory_.clear(); }
  // The same where operations have failed: what is under way is not waited for.
  void drop();
  bool is_gathered(size_t group) const { return groups_[group].is_gathered; }
  // How many groups were started and not gathered yet.
  size_t ahead() const;
  // This rank's part is what stands in the gathered values now.
  void write_back(size_t group);

  // The group is there for a backward pass, and is to be released once so many gradients have landed, and
  // passed() was called so many times. Adds to what a pass through it still waits for.
  void keep_until(size_t group, size_t landings, size_t passes);
  // Return true where that was the last one.
  bool landed(size_t group) { return counted(group, groups_[group].landings); }
  bool passed(size_t group) { return counted(group, groups_[group].passes); }

  // The groups, in the order in which gathers were started since the last call.
  std::vector<size_t> take_started() { return std::exchange(started_, {}); }

 private:
  struct Unit {
    at::Tensor own;
    int64_t elements;
    UnitMemory memory;
    at::Tensor whole;  // while the group is gathered, or on its way
    Work work;
  };
  struct Group {
    std::vector<size_t> units;
    bool is_started = false, is_gathered = false;
    size_t landings = 0, passes = 0;  // that it is still kept for
  };

  bool counted(size_t group, size_t& count);

  const std::shared_ptr<Communicator> ranks_;
  std::vector<Unit> units_;
  std::vector<Group> groups_;
  FlatPool memory_;
  std::vector<size_t> started_;
};

}  // namespace pacer::detail
