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
#include <pacer/hooks/detail/sampler_state.h>

namespace pacer {

namespace {

__extension__ using Uint128 = unsigned __int128;

int64_t read_number(torch::serialize::InputArchive& archive, const char* key, const std::string& whose) {
  c10::IValue value;
  require(archive.try_read(key, value) && value.isInt(), "the archive has no number \"", key, "\" of ",
          whose);
  return value.toInt();
}

// Where an epoch was handed out to its end, but most of its examples were never counted.
template <class State>
void warn_of_lost_examples(const State& state) {
  const auto trained = static_cast<size_t>(state.trained);
  if (trained == 0 || state.count_between(state.next, state.size) > 0 || 2 * trained > state.size) return;
  TORCH_WARN(detail::concatenate(
      state.a_name(), " has handed out an epoch of ", state.size, " examples, of which only ", trained,
      " were counted as trained on, so that a resume would go on at the wrong place; where the first "
      "dimension of the first tensor is not the examples (sequence-first or packed batches), call "
      "session.count_examples(n) between begin and backward"));
}

// Where all batches below the size that was asked for, and no others, were never trained on.
template <class State>
void warn_of_dropped_batches(const State& state) {
  const size_t waiting = state.count_between(static_cast<size_t>(state.trained), state.next);
  if (!state.is_in_session || state.ends.size() < 2 || waiting == 0 || waiting != state.in_small_batches)
    return;
  TORCH_WARN(detail::concatenate(
      "a loader was left with ", waiting, " examples of ", state.a_name(),
      " that were not trained on, all of them in batches smaller than the loader's batch size; a loader with "
      "drop_last(true) drops these, so leave it false"));
}

}  // namespace

void EpochSampler::State::arrange() {
  order = EpochSampler::order(size, seed, epoch);
  ends = {size};
}

void EpochSampler::State::set_ranks(const Communicator& world) {
  rank = static_cast<size_t>(world.rank());
  world_size = static_cast<size_t>(world.world_size());
  require(size >= world_size, a_name(), " of ", size, " examples cannot serve ", world_size, " ranks");
}

size_t EpochSampler::State::count_between(size_t from, size_t to) const {
  size_t count = 0;
  for (auto end = std::upper_bound(ends.begin(), ends.end(), from); from < to; ++end) {
    count += (std::min(to, *end) - from) / world_size;
    from = *end;
  }
  return count;
}

size_t EpochSampler::State::position_after(size_t from, size_t examples) const {
  for (auto end = std::upper_bound(ends.begin(), ends.end(), from); end != ends.end(); ++end) {
    const size_t in_batch = (*end - from) / world_size;
    if (examples <= in_batch) return from + examples * world_size;
    examples -= in_batch;
    from = *end;
  }
  return size;
}

EpochSampler::EpochSampler(std::shared_ptr<State> state) : state_(std::move(state)) {}

EpochSampler::EpochSampler(size_t size, uint64_t seed) : state_(std::make_shared<State>(size, seed)) {
  require(size > 0, "an EpochSampler needs at least one example");
}

EpochSampler::EpochSampler(size_t size, uint64_t seed, const Communicator& world) : EpochSampler(size, seed) {
  state_->set_ranks(world);
}

// Fisher and Yates' shuffle: element i changes places with one of the elements 0 ... i, drawn as the high
// bits of a 64-bit product (Lemire, arXiv:1805.10941, without the rejection: for any data set that fits a
// machine its bias is below 2^-16 of a probability).
std::vector<size_t> detail::shuffled(size_t size, uint64_t seed, int64_t epoch, RandomStream stream) {
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = size; i-- > 1;) {
    const PhiloxCounter draw =
        philox4x32_10(philox_key(seed), philox_counter(i, static_cast<uint64_t>(epoch), 0, stream));
    const uint64_t random = (static_cast<uint64_t>(draw.word[1]) << 32) | draw.word[0];
    const auto chosen = static_cast<size_t>((static_cast<Uint128>(random) * (i + 1)) >> 64);
    std::swap(order[i], order[chosen]);
  }
  return order;
}

std::vector<size_t> EpochSampler::order(size_t size, uint64_t seed, int64_t epoch) {
  return detail::shuffled(size, seed, epoch, RandomStream::epoch_order);
}

void EpochSampler::reset(std::optional<size_t> new_size) {
  State& state = *state_;
  require(!new_size || *new_size == state.size, state.a_name(), " of ", state.size, " examples was reset to ",
          new_size.value_or(0), "; make a new one for another data set");
  if (!state.resumes && state.has_handed_out) {
    warn_of_lost_examples(state);
    warn_of_dropped_batches(state);
  }
  if (!std::exchange(state.resumes, false)) {
    ++state.epoch;
    state.trained = 0;
  }
  state.arrange();
  state.next = static_cast<size_t>(state.trained);
  state.in_small_batches = 0;
  state.has_handed_out = false;
}

std::optional<std::vector<size_t>> EpochSampler::next(size_t batch_size) {
  state_->require_batch_size(batch_size);
  if (state_->epoch < 0 || state_->resumes) reset();  // who has no DataLoader may forget it
  State& state = *state_;
  size_t count = 0;
  for (auto end = std::upper_bound(state.ends.begin(), state.ends.end(), state.next);
       end != state.ends.end() && count == 0; ++end) {
    count = std::min(batch_size, (*end - state.next) / state.world_size);
    if (count == 0) state.next = *end;  // what the batch leaves over
  }
  if (count == 0) return std::nullopt;
  if (count < batch_size) state.in_small_batches += count;
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
  State& state = *state_;
  require(examples == 0 || state.has_ever_handed_out, "a Session counts the examples of ", state.a_name(),
          " that has handed out none, so that no resume would go on at the right place; give the loader the "
          "same sampler: make_data_loader(data, sampler, ...)");
  const auto trained = static_cast<size_t>(state.trained), counted = static_cast<size_t>(examples);
  const size_t waiting = state.has_handed_out ? state.count_between(trained, state.next) : counted;
  require(counted <= waiting, "a micro-batch counts as ", examples, " examples, but only ", waiting,
          " that the ", state.name(),
          " has handed out are not trained on yet; where the first dimension of the first "
          "tensor is not the examples (sequence-first or packed batches), call "
          "session.count_examples(n) between begin and backward");
  state.trained = static_cast<int64_t>(state.position_after(trained, counted));
}

std::shared_ptr<Hook> EpochSampler::hook() const { return std::make_shared<detail::EpochSamplerHook>(*this); }

void EpochSampler::enter_session() {
  require(!state_->is_in_session, "this ", state_->name(),
          " is in use by another Session, which counts its examples; where two Sessions "
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
  require(epoch >= 0, state_->a_name(), " cannot go on in epoch ", epoch);
  require(examples >= 0 && examples <= static_cast<int64_t>(state_->size), state_->a_name(), " of ",
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
  if (const auto rules = state_->rules()) archive.write("rules", c10::IValue(*rules));
}

void EpochSampler::load(torch::serialize::InputArchive& archive) {
  const std::string whose = state_->a_name();
  const int64_t size = read_number(archive, "size", whose);
  require(size == static_cast<int64_t>(state_->size), "the archive is of a sampler of ", size,
          " examples, but this one has ", state_->size);
  if (const auto rules = state_->rules()) {
    require(read_number(archive, "rules", whose) == *rules, "the archive is of ", whose,
            " with other lengths or options; they must be the same");
  }
  const auto seed = static_cast<uint64_t>(read_number(archive, "seed", whose));
  const int64_t examples = read_number(archive, "examples", whose);
  resume_at(read_number(archive, "epoch", whose), examples);
  state_->seed = seed;
}

}  // namespace pacer
