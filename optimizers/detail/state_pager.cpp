#include <pacer/optimizers/detail/state_pager.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

// Where a piece's elements would start if all of its tensor lay there. Pointers are made of integers, because
// that may be outside of any memory.
void* biased(void* memory, int64_t bytes) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes));
}

void set_state_pointer(const StateField& field, void* pointer, kernels::AdamTensor& tensor) {
  if (&field == &kStateFields[0]) {
    tensor.exp_avg = pointer;
  } else if (&field == &kStateFields[1]) {
    tensor.exp_avg_sq = pointer;
  } else if (field.kind == StateKind::max_moment) {
    tensor.max_exp_avg_sq = pointer;
  } else {
    tensor.master_or_remainder = pointer;
  }
}

}  // namespace

// Holds the pager for a scope, unless it is held already.
class StatePager::Holding {
 public:
  explicit Holding(StatePager& pager) : pager_(pager), was_held_(pager.is_held_by_owner_) {
    pager_.acquire();
  }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;
  ~Holding() {
    if (!was_held_) pager_.release();
  }

 private:
  StatePager& pager_;
  bool was_held_;
};

// Pages as they should be, before there is memory for them.
struct StatePager::Draft {
  std::vector<std::vector<Page>> resident, streamed;  // by table
};

StatePager::StatePager(const Paging& paging, std::unique_ptr<PageDevice> device, at::Device where)
    : paging_(paging),
      where_(where),
      device_(std::move(device)),
      segments_(*device_),
      budget_(paging.resident_bytes()) {
  if (paging_.on_pressure()) device_->watch_pressure([this] { make_room(); });
}

StatePager::~StatePager() {
  try {
    device_->watch_pressure(nullptr);
    forget_plan();
  } catch (const std::exception&) {
    // The device failed, which the call that it failed in has said.
  }
}

void StatePager::acquire() {
  if (is_held_by_owner_) return;
  while (is_held_.exchange(true)) std::this_thread::yield();
  is_held_by_owner_ = true;
}

void StatePager::release() {
  if (!is_held_by_owner_) return;
  is_held_by_owner_ = false;
  is_held_ = false;
}

// ---- plan ----

std::vector<PageCopy> StatePager::copies_of_page(const Page& page) const {
  std::vector<PageCopy> copies;
  for (const PageExtent& extent : page.extents) {
    int64_t area = 0;
    for (const HostField& field : segments_.fields(extent.segment)) {
      const int64_t bytes = field.element_bytes();
      auto* const begin = static_cast<char*>(field.memory.mutable_data_ptr());
      copies.push_back({begin + extent.offset * bytes, area + extent.place * bytes, extent.count * bytes});
      area += page.elements * bytes;
    }
  }
  return copies;
}

std::vector<PagedPiece> StatePager::pieces_of(const Page& page, const std::vector<ParameterEntry>& entries,
                                              const DtypeTable& table, void* memory) const {
  std::vector<PagedPiece> pieces;
  for (const PagePiece& piece : page.pieces) {
    const ParameterEntry& entry = entries[piece.item];
    PagedPiece& made = pieces.emplace_back(
        PagedPiece{entry.position, piece.first, piece.count, table.tensor(entry.position)});
    int64_t area = 0;
    for (const HostField& field : segments_.fields(*entry.host_segment)) {
      const int64_t bytes = field.element_bytes();
      set_state_pointer(*field.field, biased(memory, area + (piece.place - piece.first) * bytes),
                        made.tensor);
      area += page.elements * bytes;
    }
  }
  return pieces;
}

StatePager::Draft StatePager::draft(const std::vector<ParameterEntry>& entries,
                                    const std::vector<DtypeTable>& tables) const {
  std::vector<int64_t> sizes, bytes_of_table(tables.size(), 1);
  for (const ParameterEntry& entry : entries) {
    const int64_t bytes = HostSegments::bytes_per_element(segments_.fields(*entry.host_segment));
    bytes_of_table[entry.table] = bytes;
    sizes.push_back(paged_bytes(entry.range.count, bytes));
  }
  const std::vector<char> is_resident = choose_resident(sizes, budget_);
  Draft draft;
  for (size_t t = 0; t < tables.size(); ++t) {
    std::vector<PagedItem> staying, passing;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].table != t) continue;
      auto& items = is_resident[i] ? staying : passing;
      items.push_back({i, *entries[i].host_segment, entries[i].host_offset, entries[i].range.count});
    }
    const bool whole = tables[t].rule() == kernels::UpdateRule::lamb;
    draft.resident.push_back(
        cut_pages(staying, bytes_of_table[t], paging_.page_bytes(), /*whole_items=*/true));
    draft.streamed.push_back(cut_pages(passing, bytes_of_table[t], paging_.page_bytes(), whole));
  }
  return draft;
}

// False where the device has no memory for it; then budget_ is what there was.
bool StatePager::take_block(std::vector<PageCopy> copies) {
  int64_t bytes = 0;
  for (const PageCopy& copy : copies) bytes = std::max(bytes, copy.place + copy.bytes);
  // Under pressure it would only be given up again.
  const bool has_room = !paging_.on_pressure() || device_->free_bytes() - bytes >= paging_.headroom();
  std::shared_ptr<void> memory = has_room ? device_->device_memory(bytes) : nullptr;
  if (memory == nullptr) {
    require<DeviceError>(paging_.on_pressure(), "the GPU has no room for resident_bytes(",
                         paging_.resident_bytes(),
                         ") of optimizer state; set less, or on_pressure(true), which takes what there is");
    budget_ = std::min(budget_ - 1, bytes_of_blocks());
    return false;
  }
  blocks_.push_back({std::move(copies), bytes, std::move(memory)});
  return true;
}

void StatePager::plan(const std::vector<ParameterEntry>& entries, const std::vector<DtypeTable>& tables) {
  const Holding holding(*this);
  forget_plan();
  Draft pages;
  for (bool is_complete = false; !is_complete;) {
    blocks_.clear();
    stream_.reset();
    pages = draft(entries, tables);
    std::vector<std::vector<PageCopy>> streamed;
    for (const auto& of_table : pages.streamed) {
      for (const Page& page : of_table) streamed.push_back(copies_of_page(page));
    }
    stream_.emplace(*device_, std::move(streamed));
    is_complete = true;
    for (const auto& of_table : pages.resident) {
      for (const Page& page : of_table) is_complete = is_complete && take_block(copies_of_page(page));
    }
  }
  size_t block = 0, page_number = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    PagedTable& table =
        tables_.emplace_back(tables[t].launch(), tables[t].rule(), tables[t].has_codes(), where_);
    std::vector<PagedPiece> resident;
    for (const Page& page : pages.resident[t]) {
      for (const PagedPiece& piece : pieces_of(page, entries, tables[t], blocks_[block].memory.get())) {
        resident.push_back(piece);
      }
      ++block;
    }
    resident_launch_.push_back(resident.empty() ? std::nullopt : std::optional(table.add_launch(resident)));
    for (const Page& page : pages.streamed[t]) {
      const auto pieces = pieces_of(page, entries, tables[t], stream_->memory_of(page_number++));
      launches_.push_back({t, table.add_launch(pieces)});
    }
  }
  is_home_ = is_resident_home_ = true;
  moved_out_ = false;
}

void StatePager::forget_plan() {
  const Holding holding(*this);
  bring_home();
  tables_.clear();
  resident_launch_.clear();
  launches_.clear();
  stream_.reset();
  blocks_.clear();
}

int64_t StatePager::resident_bytes() {
  const Holding holding(*this);
  return bytes_of_blocks();
}

int64_t StatePager::bytes_of_blocks() const {
  int64_t bytes = 0;
  for (const Block& block : blocks_) bytes += block.bytes;
  return bytes;
}

// ---- a step ----

void StatePager::prepare(const std::vector<DtypeTable>& tables) {
  require(
      is_home_ || versions_ == segments_.versions(),
      "the paged state of an optimizer was changed while copies of it were under way; call sync_state() of "
      "the optimizer before changing what its state() holds");
  for (size_t t = 0; t < tables_.size(); ++t) {
    tables_[t].set_gradients(tables[t].gradients());
    tables_[t].send();
  }
  if (blocks_.empty() || !is_resident_home_) return;
  for (const Block& block : blocks_) {
    copy_page(*device_, PageQueue::load, block.copies, block.memory.get());
  }
  device_->synchronize(PageQueue::load);
}

void StatePager::step(const kernels::StepScalars* scalars) {
  versions_ = segments_.versions();
  is_home_ = false;
  bool follows_prologue = true;
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!resident_launch_[t] || !tables_[t].takes_part(*resident_launch_[t])) continue;
    is_resident_home_ = false;
    device_->update([this, t, scalars, follows_prologue] {
      tables_[t].step(*resident_launch_[t], scalars, follows_prologue);
    });
    follows_prologue = false;
  }
  if (!blocks_.empty()) device_->record(PageQueue::update, kResidentUpdated);
  std::vector<char> takes_part;
  for (const PageLaunch& page : launches_) takes_part.push_back(tables_[page.table].takes_part(page.launch));
  stream_->run(takes_part, [this, scalars](size_t page) {
    tables_[launches_[page].table].step(launches_[page].launch, scalars, /*follows_prologue=*/false);
  });
}

void StatePager::prefetch() {
  if (!stream_ || moved_out_) return;
  const Holding holding(*this);
  versions_ = segments_.versions();
  is_home_ = false;
  stream_->prefetch();
}

// What blocks have is copied home, and is not needed there any more.
void StatePager::store_resident() {
  if (is_resident_home_) return;
  device_->wait(PageQueue::store, kResidentUpdated);
  for (const Block& block : blocks_) copy_page(*device_, PageQueue::store, block.copies, block.memory.get());
  device_->synchronize(PageQueue::store);
  is_resident_home_ = true;
}

void StatePager::bring_home() {
  const Holding holding(*this);
  const c10::DeviceGuard guard(where_);
  if (stream_) stream_->finish();
  store_resident();
  is_home_ = true;
}

// By any thread, under the lock of LibTorch's allocator.
void StatePager::make_room() {
  if (is_held_.exchange(true)) return;  // a step is being enqueued; it needs what is where it is
  try {
    while (!blocks_.empty() && device_->free_bytes() < paging_.headroom()) {
      const Block& last = blocks_.back();
      if (!is_resident_home_) {
        device_->wait(PageQueue::store, kResidentUpdated);
        copy_page(*device_, PageQueue::store, last.copies, last.memory.get());
        device_->synchronize(PageQueue::store);
      }
      moved_out_ = true;  // the plan is made anew before the next step
      blocks_.pop_back();
      budget_ = bytes_of_blocks();
    }
  } catch (...) {
    is_held_ = false;
    throw;
  }
  is_held_ = false;
}

}  // namespace pacer::detail
