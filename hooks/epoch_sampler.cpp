#include <pacer/hooks/epoch_sampler.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <pacer/collectives/communicator.h>
#include <pacer/core/error.h>
#include <pacer/core/philox.h>
#include <pacer/hooks/detail/epoch_sampler_hook.h>

namespace pacer {

struct EpochSampler::State {
  size_t size = 0;
  uint64_t seed = 0;
  size_t rank = 0, world_size = 1;
  int64_t epoch = -1;    // before the first reset
  int64_t trained = 0;   // by all ranks
  bool resumes = false;  // the next reset goes on in this epoch
  size_t next = 0;       // into order: where the next example of each rank stands
  std::vector<size_t> order;
  bool has_handed_out = false;  // since the last reset
  bool has_ever_handed_out = false;
  bool is_in_session = false;
};

namespace {

__extension__ using Uint128 = unsigned __int128;

int64_t read_number(torch::serialize::InputArchive& archive, const char* key) {
  c10::IValue value;
  require(archive.try_read(key, value) && value.isInt(), "the archive has no number \"", key,
          "\" of an EpochSampler");
  return value.toInt();
}

// Where an epoch was handed out to its end, but most of its examples were never counted.
template <class State>
void warn_of_lost_examples(const State& state) {
  const auto trained = static_cast<size_t>(state.trained);
  if (trained == 0 || state.next + state.world_size <= state.size || 2 * trained > state.size) return;
  TORCH_WARN(detail::concatenate(
      "an EpochSampler has handed out an epoch of ", state.size, " examples, of which only ", trained,
      " were counted as trained on, so that a resume would go on at the wrong place; where the first "
      "dimension of the first tensor is not the examples (sequence-first or packed batches), call "
      "session.count_examples(n) between begin and backward"));
}

}  // namespace

EpochSampler::EpochSampler(size_t size, uint64_t seed) : state_(std::make_shared<State>()) {
  require(size > 0, "an EpochSampler needs at least one example");
  state_->size = size;
  state_->seed = seed;
}

EpochSampler::EpochSampler(size_t size, uint64_t seed, const Communicator& world) : EpochSampler(size, seed) {
  state_->rank = static_cast<size_t>(world.rank());
  state_->world_size = static_cast<size_t>(world.world_size());
  require(size >= state_->world_size, "an EpochSampler of ", size, " examples cannot serve ",
          state_->world_size, " ranks");
}

// Fisher and Yates' shuffle: element i changes places with one of the elements 0 ... i, drawn as the high
// bits of a 64-bit product (Lemire, arXiv:1805.10941, without the rejection: for any data set that fits a
// machine its bias is below 2^-16 of a probability).
std::vector<size_t> EpochSampler::order(size_t size, uint64_t seed, int64_t epoch) {
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = size; i-- > 1;) {
    const PhiloxCounter draw = philox4x32_10(
        philox_key(seed), philox_counter(i, static_cast<uint64_t>(epoch), 0, RandomStream::epoch_order));
    const uint64_t random = (static_cast<uint64_t>(draw.word[1]) << 32) | draw.word[0];
    const auto chosen = static_cast<size_t>((static_cast<Uint128>(random) * (i + 1)) >> 64);
    std::swap(order[i], order[chosen]);
  }
  return order;
}

void EpochSampler::reset(std::optional<size_t> new_size) {
  require(!new_size || *new_size == state_->size, "an EpochSampler of ", state_->size,
          " examples was reset to ", new_size.value_or(0), "; make a new one for another data set");
  if (!state_->resumes && state_->has_handed_out) warn_of_lost_examples(*state_);
  if (!std::exchange(state_->resumes, false)) {
    ++state_->epoch;
    state_->trained = 0;
  }
  state_->order = order(state_->size, state_->seed, state_->epoch);
  state_->next = static_cast<size_t>(state_->trained);
  state_->has_handed_out = false;
}

std::optional<std::vector<size_t>> EpochSampler::next(size_t batch_size) {
  if (state_->epoch < 0 || state_->resumes) reset();  // who has no DataLoader may forget it
  State& state = *state_;
  const size_t left = state.next < state.size ? (state.size - state.next) / state.world_size : 0;
  const size_t count = std::min(batch_size, left);
  if (count == 0) return std::nullopt;
  state.has_handed_out = state.has_ever_handed_out = true;
  last_in_this_thread() = state_;
  std::vector<size_t> batch;
  for (size_t i = 0; i < count; ++i, state.next += state.world_size) {
    batch.push_back(state.order[state.next + state.rank]);
  }
  return batch;
}

size_t EpochSampler::size() const { return state_->size; }
uint64_t EpochSampler::seed() const { return state_->seed; }
int EpochSampler::rank() const { return static_cast<int>(state_->rank); }
int EpochSampler::world_size() const { return static_cast<int>(state_->world_size); }
int64_t EpochSampler::epoch() const { return std::max<int64_t>(0, state_->epoch); }
int64_t EpochSampler::examples_trained() const { return state_->trained; }

void EpochSampler::count(int64_t examples) {
  require(examples == 0 || state_->has_ever_handed_out,
          "a Session counts the examples of an EpochSampler that has handed out none, so that no resume "
          "would go on at the right place; give the loader the same sampler: make_data_loader(data, sampler, "
          "...)");
  const auto size = static_cast<int64_t>(state_->size);
  const int64_t trained = state_->trained + examples * static_cast<int64_t>(state_->world_size);
  const auto handed_out = static_cast<int64_t>(state_->next);
  require(
      trained <= handed_out || !state_->has_handed_out, "a micro-batch counts as ", examples,
      " examples, but only ", (handed_out - state_->trained) / static_cast<int64_t>(state_->world_size),
      " that the EpochSampler has handed out are not trained on yet; where the first dimension of the first "
      "tensor is not the examples (sequence-first or packed batches), call "
      "session.count_examples(n) between begin and backward");
  state_->trained = std::min(size, trained);
}

std::shared_ptr<Hook> EpochSampler::hook() const { return std::make_shared<detail::EpochSamplerHook>(*this); }

void EpochSampler::enter_session() {
  require(!state_->is_in_session,
          "this EpochSampler is in use by another Session, which counts its examples; where two Sessions "
          "train on the same batches, give it to one of them");
  state_->is_in_session = true;
}

void EpochSampler::leave_session() { state_->is_in_session = false; }

std::weak_ptr<EpochSampler::State>& EpochSampler::last_in_this_thread() {
  thread_local std::weak_ptr<State> last;
  return last;
}

bool detail::sampler_is_unseen() {
  const auto last = EpochSampler::last_in_this_thread().lock();
  return last != nullptr && !last->is_in_session && last->trained == 0;
}

void EpochSampler::resume_at(int64_t epoch, int64_t examples) {
  require(epoch >= 0, "an EpochSampler cannot go on in epoch ", epoch);
  require(examples >= 0 && examples <= static_cast<int64_t>(state_->size), "an EpochSampler of ",
          state_->size, " examples cannot go on after ", examples, "; is it the same data set?");
  state_->epoch = epoch;
  state_->trained = examples;
  state_->resumes = true;
}

void EpochSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("size", c10::IValue(static_cast<int64_t>(size())));
  archive.write("seed", c10::IValue(static_cast<int64_t>(seed())));
  archive.write("epoch", c10::IValue(epoch()));
  archive.write("examples", c10::IValue(examples_trained()));
}

void EpochSampler::load(torch::serialize::InputArchive& archive) {
  const int64_t size = read_number(archive, "size");
  require(size == static_cast<int64_t>(state_->size), "the archive is of a sampler of ", size,
          " examples, but this one has ", state_->size);
  const auto seed = static_cast<uint64_t>(read_number(archive, "seed"));
  const int64_t examples = read_number(archive, "examples");
  resume_at(read_number(archive, "epoch"), examples);
  state_->seed = seed;
}

}  // namespace pacer
