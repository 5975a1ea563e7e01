// What happens to gradients between their hooks and the sums of this rank's parts: the state that a
// ParameterShards shares with the hooks on its parameters. Nobody else sees it, so all of it is public.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <pacer/collectives/detail/arrival_order.h>
#include <pacer/collectives/detail/withheld_gradients.h>
#include <pacer/parallel/detail/flat_pool.h>
#include <pacer/parallel/detail/unit_memory.h>
#include <pacer/parallel/parameter_shards.h>

namespace pacer {

class ParameterShards::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Communicator> ranks, std::shared_ptr<Communicator> replicas,
        const ParameterShardsOptions& options)
      : ranks_(std::move(ranks)),
        replicas_(std::move(replicas)),
        options_(options),
        withheld_(options.touch_remedy()) {}

  // Parameters of one dtype that travel together.
  struct Unit {
    std::vector<size_t> members;  // positions in parts_
    size_t group;
    bool is_trained;  // its parameters need gradients
    bool may_stay_local;
    bool is_split_by_rows;  // no gradients of it travel
    ShardLayout layout;
    at::Tensor parameters = {};      // flat; where ranks keep parts only while it is gathered, or on its way
    at::Tensor own_parameters = {};  // this rank's part of it
    std::optional<detail::UnitMemory> memory = {};  // once ranks keep parts
    Work gathering = {};
    at::Tensor gradient = {};     // of this rank's part: the sum since the last update
    c10::Storage no_memory = {};  // of `gradient`, and of the parts', while there is no sum
    bool has_gradient = false;    // something was added to it
    at::Tensor landing = {};  // flat, where this rank's gradients come together; undefined before the first
    at::Tensor sum = {};      // of this pass, where it is not `gradient` itself
    at::Tensor wide = {};     // fp32: the sum of several passes of 16 bits; it becomes `gradient`
    Work work = {};           // the sum under way
    bool is_replicated = false;  // `gradient` is, or becomes, the sum over replicas
    Work replication = {};

    // Asks about the gradient.
    bool has_memory() const {
      return gradient.storage().unsafeGetStorageImpl() != no_memory.unsafeGetStorageImpl();
    }
  };
  // Units whose values come and go together.
  struct GatheredGroup {
    std::vector<size_t> units;
    bool is_started = false, is_gathered = false;
    size_t landings = 0, passes = 0;  // of gradients, and calls of passed(), that it is still kept for
  };
  // Flat memory that units use in turn.
  struct LandingBuffer {
    at::Tensor memory;
    Unit* user = nullptr;
  };

  // ---- parameter_shards_units.cpp ----
  void add(const std::vector<NamedParameter>& parameters);
  void add_groups(const std::vector<Group>& groups);
  void add_part(const NamedParameter& parameter);
  void make_units();
  static bool contains(const std::vector<at::Tensor>& all, const at::Tensor& parameter);
  bool may_stay_local(const at::Tensor& parameter) const;
  void add_unit(std::vector<size_t> members, size_t group);
  void move_parameters();
  void make_parts();
  at::Tensor own_piece(size_t i, const at::Tensor& part) const;
  void add_hooks();
  void require_in_place() const;
  bool is_in_place(size_t unit, size_t member) const;
  void set_absent(const std::vector<at::Tensor>& parameters, std::vector<char>& marks) const;

  // ---- parameter_shards_rows.cpp ----
  bool is_split_by_rows(const at::Tensor& parameter) const;
  void check_split(const std::vector<Group>& groups) const;
  int64_t piece_of(const at::Tensor& parameter) const;
  static void require_no_gradient(const Part& part);
  void add_part_gradient(size_t position, const at::Tensor& gradient);

  // ---- parameter_shards_values.cpp ----
  bool has_deferred(size_t group) const;
  void give_memory(Unit& unit);
  void keep_part(size_t group);
  void keep_part(Unit& unit);
  at::Tensor moved_parameters(const Unit& unit);

  // ---- parameter_shards_memory.cpp ----
  void take_gradient(Unit& unit);
  void release_gradient(Unit& unit);
  void set_gradient_memory(const Unit& unit, const c10::Storage& memory);
  void make_landing(Unit& unit);
  at::Tensor take_landing_buffer(Unit& unit);
  at::Tensor take_memory(const Unit& unit);
  void start_gather(size_t group);
  void finish_gather(size_t group);
  void gather(size_t group);
  void release(size_t group);
  void release_all();
  void drop_values();
  void count(size_t group, size_t& awaited);
  std::string group_name(size_t group) const;

  // ---- parameter_shards.cpp ----
  void begin(const Pass& pass);
  Unit& unit_of(size_t position) { return units_[gradients_.bucket_of(position)]; }
  // Groups stay gathered after the pass under way.
  bool keeps_gathered() const { return options_.keep_after_forward() && active_ && !pass_.is_last; }
  bool stays_local(const Unit& unit) const { return unit.may_stay_local && pass_.stays_local; }
  bool sends() const { return options_.reduce_every_backward() || pass_.is_last; }
  void land(size_t position);  // from the hooks
  void copy_gradient(size_t position);
  at::Tensor place_of(size_t position);
  void send_full_units();
  void send(Unit& unit);
  void finish(Unit& unit);
  void add_sum(Unit& unit) const;
  static void round_sum(Unit& unit);
  bool adds_up_wide(const Unit& unit) const {
    return options_.accumulate_in_fp32() && unit.gradient.element_size() < 4;
  }
  void add_over_replicas(Unit& unit);
  void require_all_reached() const;
  void require_untouched();
  void finish_all();
  void forget_pass();
  void settle_dropped();

  const std::shared_ptr<Communicator> ranks_, replicas_;
  const ParameterShardsOptions options_;
  std::vector<Part> parts_;
  std::unordered_map<const void*, size_t> positions_;  // by TensorImpl
  std::vector<size_t> place_in_unit_;                  // by position
  std::vector<Unit> units_;                            // in the order in which they are sent
  std::vector<LandingBuffer> landing_buffers_;
  detail::FlatPool memory_;      // instead of landing buffers, with groups
  Unit* newest_sent_ = nullptr;  // of the pass under way
  std::vector<GatheredGroup> groups_;
  detail::FlatPool values_memory_;  // of groups that are gathered
  bool keeps_parts_ = false;
  bool may_be_changed_ = false;  // between gather_all and release_all
  std::vector<Operation> history_;
  detail::WithheldGradients withheld_;  // from end() to begin() or wait(), numbered as parts_
  double prescale_ = 1;

  std::mutex mutex_;  // hooks run on autograd's threads
  bool active_ = false;
  bool has_begun_ = false;                         // a pass since the last update
  bool was_dropped_ = false;                       // the window before; what it sent may still be under way
  int64_t sums_sent_ = 0, replications_sent_ = 0;  // in this window
  Pass pass_;
  detail::ArrivalOrder gradients_;     // of the pass under way; buckets are units
  std::vector<char> has_contributed_;  // by position: in a pass since the last update; whole gradients only
  std::vector<char> was_reached_;      // by position: by a pass since the last update
  std::vector<char> absent_in_all_;    // by position
};

}  // namespace pacer
