// What happens to gradients between their hooks and the sums of this rank's parts: the state that a
// ParameterShards shares with the hooks on its parameters.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <pacer/sharding/parameter_shards.h>

namespace pacer {

class ParameterShards::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Communicator> ranks, const ParameterShardsOptions& options)
      : ranks_(std::move(ranks)), options_(options) {}

  void add(const std::vector<NamedParameter>& parameters);
  void begin(const Pass& pass);
  void end();
  void reduce(const std::vector<at::Tensor>& absent_in_all);
  void wait();
  void drop();
  void gather_parameters();

  const std::vector<Part>& parts() const { return parts_; }
  ShardPiece piece(size_t i, int rank) const;
  double scale() const { return prescale_; }
  std::vector<std::vector<std::string>> units() const;

 private:
  // Parameters of one dtype that travel together.
  struct Unit {
    std::vector<size_t> members;  // positions in parts_
    ShardLayout layout;
    at::Tensor parameters, own_parameters;  // flat, and this rank's part of it
    at::Tensor gradient;                    // of this rank's part: the sum since the last update
    bool has_gradient = false;              // something was added to it
    at::Tensor landing;  // flat, where this rank's gradients come together; undefined before the first
    size_t awaited = 0;  // members that this backward may still reach
    at::Tensor sum;      // of this pass, where it is not `gradient` itself
    Work work;           // the sum under way
  };
  // Flat memory that units use in turn.
  struct Slot {
    at::Tensor memory;
    Unit* user = nullptr;
  };
  // How far a parameter of the pass under way is: `absent` ones are not awaited.
  enum class Stage : char { awaited, absent, landed };

  void make_units();
  void move_parameters();
  void make_parts();
  Unit& unit_of(size_t position) { return units_[unit_of_[position]]; }
  bool sends() const { return options_.reduce_every_backward() || pass_.is_last; }
  void require_in_place() const;
  void set_absent(const std::vector<at::Tensor>& parameters, std::vector<char>& marks) const;
  void land(size_t position);  // from the hooks
  void copy_gradient(size_t position);
  at::Tensor place_of(size_t position);
  void make_landing(Unit& unit);
  at::Tensor take_slot(Unit& unit);
  void send_full_units();
  void send(Unit& unit);
  void finish(Unit& unit);
  void require_all_reached() const;
  void forget_pass();

  const std::shared_ptr<Communicator> ranks_;
  const ParameterShardsOptions options_;
  std::vector<Part> parts_;
  std::unordered_map<const void*, size_t> positions_;  // by TensorImpl
  std::vector<size_t> unit_of_, place_in_unit_;        // by position
  std::vector<Unit> units_;                            // in the order in which they are sent
  std::vector<Slot> slots_;
  double prescale_ = 1;

  std::mutex mutex_;  // hooks run on autograd's threads
  bool active_ = false;
  Pass pass_;
  std::vector<Stage> stages_;          // by position
  std::vector<char> has_contributed_;  // by position: in a pass since the last update; whole gradients only
  std::vector<char> absent_in_all_;    // by position
  size_t next_ = 0;                    // the unit that is sent next
};

}  // namespace pacer
