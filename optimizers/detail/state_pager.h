// The paged state of one optimizer: which of it is where, and how it moves. State tensors are views of host
// memory, all of them. What a step needs of them it copies to the device and back, in pages; what stays on
// the device between steps does so in memory of this class's own, which no tensor shows, so that it can be
// given up at any time. What is newer on the device comes home before host memory is read.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <pacer/optimizers/detail/dtype_table.h>
#include <pacer/optimizers/detail/host_segments.h>
#include <pacer/optimizers/detail/page_device.h>
#include <pacer/optimizers/detail/page_plan.h>
#include <pacer/optimizers/detail/page_stream.h>
#include <pacer/optimizers/detail/paged_table.h>
#include <pacer/optimizers/paging.h>

namespace pacer::detail {

class StatePager {
 public:
  // `where` the parameters are.
  StatePager(const Paging& paging, std::unique_ptr<PageDevice> device, at::Device where);
  StatePager(const StatePager&) = delete;
  StatePager& operator=(const StatePager&) = delete;
  ~StatePager();

  at::Device where() const { return where_; }
  // Where prepare_state makes tensors, after segments().place.
  HostSegments& segments() { return segments_; }

  // Between these two nothing moves out under pressure. prepare ... step need it; the others see to it
  // themselves. Only the thread that uses the optimizer calls them, and either may come twice.
  void acquire();
  void release();

  // Cuts the entries' state, all of which has its place on the host, into pages, and takes device memory for
  // them. Throws DeviceError where there is none.
  void plan(const std::vector<ParameterEntry>& entries, const std::vector<DtypeTable>& tables);
  // False where state was moved out since.
  bool fits() const { return !moved_out_; }
  // Everything comes home, and nothing of the plan is left.
  void forget_plan();

  // What the host does for a step. Throws InvalidArgument where host memory was changed while it was not
  // home.
  void prepare(const std::vector<DtypeTable>& tables);
  // Enqueues the update. `scalars` as in DtypeTable::step, nothing having been enqueued since they were
  // written.
  void step(const kernels::StepScalars* scalars);
  // Starts the first copies of the coming step.
  void prefetch();
  // The host waits until host memory has all that the device has, and may be changed until prefetch or step.
  void bring_home();

  // Returns the trust ratio of the tensor at that position of a table; waits for a GPU.
  double trust_ratio(size_t table, size_t position) const { return tables_[table].trust_ratio(position); }
  // Bytes that stay on the device now.
  int64_t resident_bytes();

 private:
  static constexpr size_t kResidentUpdated = PageStream::kEvents;  // an event

  // Tensors that stay on the device, whole, in one piece of its memory.
  struct Block {
    std::vector<PageCopy> copies;
    int64_t bytes;
    std::shared_ptr<void> memory;
  };
  struct PageLaunch {
    size_t table;
    size_t launch;
  };
  struct Draft;
  class Holding;

  Draft draft(const std::vector<ParameterEntry>& entries, const std::vector<DtypeTable>& tables) const;
  bool take_block(std::vector<PageCopy> copies);
  std::vector<PageCopy> copies_of_page(const Page& page) const;
  std::vector<PagedPiece> pieces_of(const Page& page, const std::vector<ParameterEntry>& entries,
                                    const DtypeTable& table, void* memory) const;
  int64_t bytes_of_blocks() const;
  void store_resident();
  void make_room();

  Paging paging_;
  at::Device where_;
  std::unique_ptr<PageDevice> device_;
  HostSegments segments_;
  std::vector<PagedTable> tables_;                      // one for each DtypeTable
  std::vector<std::optional<size_t>> resident_launch_;  // by table
  std::vector<PageLaunch> launches_;                    // by page of the stream
  std::optional<PageStream> stream_;
  std::vector<Block> blocks_;
  int64_t budget_;                // of resident bytes; shrinks under pressure
  bool is_home_ = true;           // host memory may be read, and changed
  bool is_resident_home_ = true;  // blocks have no values; host memory has them
  uint64_t versions_ = 0;         // of host memory when it was last home
  std::atomic<bool> is_held_{false};
  bool is_held_by_owner_ = false;
  std::atomic<bool> moved_out_{false};
};

}  // namespace pacer::detail
