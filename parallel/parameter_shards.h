// Parameters of which each rank updates a part only: gradients are added over ranks into the parts while
// backward still runs, each rank updates its own, and the new values come together again (ZeRO stages 1 and
// 2; Rajbhandari et al., arXiv:1910.02054). It sends what DataParallel sends.
//
//   pacer::ParameterShards shards(model->named_parameters(), world);
//   shards.begin_backward();
//   loss.backward();                  // units of parameters travel while this runs
//   shards.end_backward();
//   shards.wait();                    // shards.parts()[i].gradient is the sum over ranks
//   ... update shards.parts() ...
//   shards.gather_parameters();
//
// The hook pacer::Shards does all of this in a Session. Parameters move into flat memory, one piece for each
// unit of about 25 MiB, so that they are gathered where they lie. A gradient leaves parameter.grad() as soon
// as backward has put it there: two units of whole gradients exist at a time, and the parts.
//
// Given groups of parameters, for example those of each block, the ranks can keep their parts of the values
// only, too (stage 3); a group then comes together before it is used, and leaves afterwards:
//
//   shards.keep_parts();
//   shards.gather(3);                 // the parameters of group 3 have their values
//   ... use them ...
//   shards.release(3);                // and are empty again: whoever touches one gets an error that names it
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <pacer/collectives/communicator.h>
#include <pacer/collectives/parameter_range.h>
#include <pacer/parallel/shard_layout.h>

namespace pacer {

struct ParameterShardsOptions {
  ParameterShardsOptions() = default;
  // Bytes of a unit, >= 1: it takes no more parameters once it has so many.
  TORCH_ARG(int64_t, unit_bytes) = int64_t{25} << 20;
  // Several backward passes before an update: true: each adds its gradients over ranks, and only parts are
  // kept between them, at the price of one reduction a pass. False: whole gradients are kept, as plain
  // accumulation does, and reduced in the last pass.
  TORCH_ARG(bool, reduce_every_backward) = true;
  // Gradients of bf16 and fp16 parameters add up over these passes in fp32, and are rounded once. It takes 4
  // bytes for each element that is kept between them, parts or whole gradients.
  TORCH_ARG(bool, accumulate_in_fp32) = true;
  // Only with groups: a group that was gathered until its gradients land stays so in all passes but the last
  // before an update, and whoever gathers for forward need not release it. More memory, fewer bytes sent.
  TORCH_ARG(bool, keep_after_forward) = false;
  // Bounds of parts cut a parameter at multiples of so many of its elements only; 1, or a multiple of 128.
  // Each unit is padded to a multiple of so many elements for each rank.
  TORCH_ARG(int64_t, piece) = 1;
  // What a parameter means that none of the passes before an update has reached: false: an error that names
  // it; true: its gradient is zero there.
  TORCH_ARG(bool, unused_is_zero) = false;
  // Parameters whose sums may stay those of `ranks`, see Pass::stays_local; they share units with their like
  // only.
  TORCH_ARG(std::vector<at::Tensor>, may_stay_local);
  // Only with groups: matrices, each alone in its group, whose gradients do not come from backward: each rank hands that of its
  // part to add_part_gradient(). Bounds of parts lie between rows, at multiples of 16.
  TORCH_ARG(std::vector<at::Tensor>, split_by_rows);
  // The end of the sentence for whoever touches a gradient between end_backward() and wait(): what to do
  // instead.
  TORCH_ARG(std::string, touch_remedy) = "call wait() first";
};

class ParameterShards {
 public:
  using NamedParameter = std::pair<std::string, at::Tensor>;

  // The same parameters with the same values, in the same order, on every rank; those that need no gradient
  // are left out. They must be contiguous and on the Communicator's device. Throws InvalidArgument, changing
  // nothing, for others and for bad options. Hooks stay on the parameters until this is destroyed; their
  // values stay in flat memory.
  //
  // `replicas`: the ranks that have the same parts in other groups of ranks, for example
  // world->between_nodes() where `ranks` are world->node(); null: there are none. Sums over `ranks` are added
  // up over them, too, once an update; nothing else travels between groups.
  ParameterShards(const std::vector<NamedParameter>& parameters, std::shared_ptr<Communicator> ranks,
                  const ParameterShardsOptions& options = {},
                  std::shared_ptr<Communicator> replicas = nullptr);
  // The same with a unit for each group, dtype, and whether gradients are needed; gradients travel in the
  // reverse of the groups' order. Parameters that need no gradient are shared out, too, but have none. Throws
  // for a parameter that is in two groups.
  using Group = std::vector<NamedParameter>;
  ParameterShards(const std::vector<Group>& groups, std::shared_ptr<Communicator> ranks,
                  const ParameterShardsOptions& options = {},
                  std::shared_ptr<Communicator> replicas = nullptr);
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;

  // A parameter and what of it is this rank's. The gradient is the same tensor in every step, which has memory
  // from the end of backward to gather_parameters() and refuses to be read while it has none; it is undefined where
  // the parameter needed none. The values are defined after keep_parts().
  struct Part : ParameterRange {
    std::string name;
    at::Tensor parameter;
    size_t group = 0;
  };
  const std::vector<Part>& parts() const;

  // `absent`: parameters that this backward will not reach, the same on every rank, for example of dropped
  // layers; a unit of nothing else is not sent. `absent_in_all`: those that none of the passes since the last
  // update has reached.
  struct Pass {
    bool is_last = true;  // before the update
    std::vector<at::Tensor> absent, absent_in_all;
    // The gradients of parameters that may stay local are added over ranks in their order, and not over
    // replicas; the same in all passes of an update.
    bool stays_local = false;
  };
  // In a backward pass, for a matrix that is split by rows: adds `gradient`, of parts()[part].count elements, in the dtype of the
  // parameter and already the sum over ranks, to the part's. Not a collective operation.
  void add_part_gradient(size_t part, const at::Tensor& gradient);
  // A backward pass starts: from here to end_backward, gradients are taken as they arrive.
  void begin_backward(const Pass& pass);
  void begin_backward() { begin_backward(Pass()); }
  // Throws InvalidArgument that names them where parameters were not reached (see unused_is_zero); then this
  // rank must leave its peers. After a backward that threw, drop() takes the place of this.
  void end_backward();
  // Returns a number for each part: 1 if no pass since the last update has reached the parameter on this
  // rank, else 0.
  std::vector<char> missed() const;
  // Instead of a last backward, for a window that ends early.
  void reduce(const std::vector<at::Tensor>& absent_in_all = {}, bool stays_local = false);
  // Returns when every part's gradient is the sum over ranks, and replicas unless it stays local (CUDA: the
  // current stream waits). From end_backward() to here or to the next begin_backward(), grad() of the
  // parameters is a stand-in without memory: InvalidArgument that names the parameter where it was cleared or
  // replaced since, once all sums are over; the next window may begin then.
  void wait();
  // Gives up the window that is under way, at the same place on all ranks; or this rank must leave its peers. It
  // never waits. The parts' gradients are undefined until the next wait(). The next begin_backward(), wait() or gather
  // waits for the sums that were sent; it throws CommunicationError where they failed, and where ranks have sent
  // different numbers of them.
  void drop();

  // Every rank's new values for all of them; the memory of the parts' gradients goes. Where ranks keep parts only,
  // what is gathered is released, as it is out of date now.
  void gather_parameters();

  // ---- Values that come and go. Only with groups. All ranks call these alike. ----

  // From now on parameters have their values only between gather and release of their group; parts().values
  // are those that are updated.
  void keep_parts();
  // The same for a group whose parameters are deferred (modules/deferred.h): first it gets memory, in which they shall be given
  // values, and then its parts are kept, before keep_parts() does so for all others.
  void give_memory(size_t group);
  void keep_part(size_t group);
  bool keeps_parts() const;
  // Returns when the values are there (CUDA: the current stream waits); nothing where they are already.
  void gather(size_t group);
  // Starts it, so that gather() finds it done, unless so many groups are on their way already.
  void gather_ahead(size_t group, size_t at_most = 1);
  // Views of the parameters that were taken before must not be read afterwards.
  void release(size_t group);
  // gather() for a backward pass through the group: it is released once all its gradients have landed and
  // passed() was called `passes` times. Where values are kept for the next pass, only in the last one.
  void gather_until_landed(size_t group, size_t passes = 0);
  void passed(size_t group);
  bool is_gathered(size_t group) const;
  // For messages: by the name of its first parameter.
  std::string group_name(size_t group) const;
  // All groups at once. Between these calls parameters may be changed, on all ranks alike; what stands there
  // is the new value.
  void gather_all();
  void release_all();
  bool all_are_gathered() const;
  // A gather of the values of a group, or a sum of gradients of one of its units.
  struct Operation {
    // Which of the two.
    enum class Kind { gather, sum };
    Kind kind;
    size_t group;
  };
  // What was sent since the last call, in order. Ranks that have sent different things have gathered wrong values.
  std::vector<Operation> take_history();
  // Returns "gathers the parameters with h.0.weight", for messages.
  std::string describe(const Operation& operation) const;

  // What the sums were multiplied with before they were added: 1 / (number of all ranks) where fp16 gradients
  // are involved, whose sum could overflow, else 1.
  double scale() const;
  // The units: for each the names of its parameters, in order.
  std::vector<std::vector<std::string>> units() const;

 private:
  class State;
  std::shared_ptr<State> state_;  // shared with the parameters' hooks
};

}  // namespace pacer
