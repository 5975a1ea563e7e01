#include <pacer/parallel/detail/stage_messages.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <pacer/core/error.h>

namespace pacer::detail {
namespace {

constexpr int64_t kMaxTensors = 8, kMaxDimensions = 8, kMaxSize = int64_t{1} << 40;
constexpr int64_t kTensorWords = 3 + kMaxDimensions;  // dtype, requires a gradient, dimensions, sizes
constexpr int64_t kWords = 1 + kMaxTensors * kTensorWords;

at::Tensor encoded(const TensorSpecs& specs) {
  at::Tensor words = at::zeros({kWords}, at::kLong);
  auto* word = words.mutable_data_ptr<int64_t>();
  *word++ = static_cast<int64_t>(specs.size());
  for (const TensorSpec& spec : specs) {
    word[0] = static_cast<int64_t>(spec.dtype);
    word[1] = spec.requires_grad ? 1 : 0;
    word[2] = static_cast<int64_t>(spec.sizes.size());
    std::copy(spec.sizes.begin(), spec.sizes.end(), word + 3);
    word += kTensorWords;
  }
  return words;
}

TensorSpecs decoded(const at::Tensor& words) {
  const auto* word = words.const_data_ptr<int64_t>();
  const auto require_between = [](int64_t least, int64_t value, int64_t most) {
    require<Error>(least <= value && value <= most,
                   "what the former stage of the pipeline says of its tensors arrived damaged; look at the "
                   "network and the memory of its host");
  };
  require_between(1, *word, kMaxTensors);
  TensorSpecs specs(static_cast<size_t>(*word++));
  for (TensorSpec& spec : specs) {
    require_between(0, word[0], static_cast<int64_t>(at::ScalarType::NumOptions) - 1);
    require_between(0, word[2], kMaxDimensions);
    for (int64_t i = 0; i < word[2]; ++i) require_between(0, word[3 + i], kMaxSize);
    spec.dtype = static_cast<at::ScalarType>(word[0]);
    spec.requires_grad = word[1] != 0;
    spec.sizes.assign(word + 3, word + 3 + word[2]);
    word += kTensorWords;
  }
  return specs;
}

void require_sendable(const Tensors& tensors, int64_t stage, at::Device device) {
  require(static_cast<int64_t>(tensors.size()) <= kMaxTensors && !tensors.empty(), "stage ", stage,
          " of the pipeline gives ", tensors.size(), " tensors to the next; it must be 1 to ", kMaxTensors);
  for (const at::Tensor& tensor : tensors) {
    require(tensor.defined() && tensor.layout() == at::kStrided && tensor.device() == device &&
                tensor.dim() <= kMaxDimensions,
            "stage ", stage,
            " of the pipeline gives the next one a tensor that cannot be sent; it must be "
            "dense, on ",
            device.str(), ", with at most ", kMaxDimensions, " dimensions");
  }
}

}  // namespace

TensorSpecs specs_of(const Tensors& tensors) {
  TensorSpecs specs;
  for (const at::Tensor& tensor : tensors) {
    specs.push_back({tensor.scalar_type(), tensor.sizes().vec(), tensor.requires_grad()});
  }
  return specs;
}

size_t StageMessages::kind_of(const Tensors& micro_batch) {
  TensorSpecs specs = specs_of(micro_batch);
  for (TensorSpec& spec : specs) spec.requires_grad = at::GradMode::is_enabled();
  const auto found = std::find(kinds_.begin(), kinds_.end(), specs);
  const auto kind = static_cast<size_t>(found - kinds_.begin());
  if (found == kinds_.end()) kinds_.push_back(std::move(specs));
  return kind;
}

// A rank sends on the queue of its parity and receives on the other one's; where the last of an odd number of
// ranks sends to the first, or the first to the last, a third one keeps them apart.
int StageMessages::queues(const PipelineSchedule& schedule) {
  const bool is_ring = schedule.chunks > 1;
  return schedule.ranks == 1                  ? 0
         : is_ring && schedule.ranks % 2 != 0 ? 3
         : is_ring || schedule.ranks > 2      ? 2
                                              : 1;
}

int StageMessages::queue_of(Direction direction, int sender, const PipelineSchedule& schedule) {
  const int count = queues(schedule), last = static_cast<int>(schedule.ranks) - 1;
  if (count == 3 && sender == (direction == Direction::activations ? last : 0)) return 2;
  return sender % std::min(count, 2);
}

StageMessages::StageMessages(std::shared_ptr<Communicator> pipeline, const PipelineSchedule& schedule)
    : pipeline_(std::move(pipeline)), schedule_(schedule) {
  for (const Direction direction : {Direction::activations, Direction::gradients}) {
    for (int i = 0; i < queues(schedule_); ++i) {
      const char* name = direction == Direction::activations ? "activations " : "gradients ";
      queues_[static_cast<size_t>(direction)].push_back(pipeline_->lane(concatenate(name, i)));
    }
  }
}

void StageMessages::send(Direction direction, int64_t from, int64_t to, Tensors tensors) {
  if (tensors.empty()) return;
  if (rank_of(from) == rank_of(to)) return to_this_rank_[{direction, to}].push_back(std::move(tensors));
  std::vector<Message> messages;
  for (const at::Tensor& tensor : tensors) messages.push_back(Message::send(tensor, rank_of(to)));
  Work work = queue(direction, rank_of(from)).send_receive(messages, CollectiveOptions().agreed(true));
  sent_.push_back({std::move(work), std::move(tensors)});
}

StageMessages::Incoming StageMessages::receive(Direction direction, int64_t from, const TensorSpecs& specs) {
  Incoming incoming;
  std::vector<Message> messages;
  for (const TensorSpec& spec : specs) {
    incoming.tensors.push_back(
        at::empty(spec.sizes, at::TensorOptions().dtype(spec.dtype).device(pipeline_->device())));
    messages.push_back(Message::receive(incoming.tensors.back(), rank_of(from)));
  }
  if (!messages.empty())
    incoming.work = queue(direction, rank_of(from)).send_receive(messages, CollectiveOptions().agreed(true));
  return incoming;
}

StageMessages::Incoming StageMessages::take(Direction direction, int64_t from, int64_t to,
                                            const TensorSpecs& specs) {
  if (rank_of(from) == rank_of(to) && !specs.empty()) {
    auto& waiting = to_this_rank_[{direction, to}];
    require<Error>(!waiting.empty(), "a stage of the pipeline has nothing to receive from this rank");
    Incoming incoming{std::move(waiting.front()), {}};
    waiting.pop_front();
    return incoming;
  }
  return receive(direction, from, specs);
}

void StageMessages::send_activations(int64_t from, size_t kind, const Tensors& tensors) {
  require_sendable(tensors, from, pipeline_->device());
  const TensorSpecs specs = specs_of(tensors);
  const auto [told, is_new] = sent_specs_.emplace(std::make_pair(from, kind), specs);
  if (!is_new && !(told->second == specs)) {
    throw InvalidArgument(concatenate(
        "stage ", from,
        " of the pipeline gives the next one tensors of other shapes, dtypes or need of a gradient "
        "than for an earlier micro-batch of the same shape; let them follow from the batch alone"));
  }
  if (rank_of(from) == rank_of(from + 1)) {
    received_specs_[{from + 1, kind}] = specs;
  } else if (is_new) {
    send(Direction::activations, from, from + 1, {encoded(specs).to(pipeline_->device())});
  }
  Tensors sent;
  for (const at::Tensor& tensor : tensors) sent.push_back(tensor.detach().contiguous());
  send(Direction::activations, from, from + 1, std::move(sent));
}

TensorSpecs StageMessages::receive_specs(int64_t from) {
  Incoming words = receive(Direction::activations, from, {{at::kLong, {kWords}, false}});
  words.work.wait();
  return decoded(words.tensors.front().cpu());
}

Tensors StageMessages::take_activations(int64_t to, size_t kind) {
  auto known = received_specs_.find({to, kind});
  if (known == received_specs_.end()) {
    known = received_specs_.emplace(std::make_pair(to, kind), receive_specs(to - 1)).first;
  }
  Incoming incoming = take(Direction::activations, to - 1, to, known->second);
  incoming.work.wait();
  for (size_t i = 0; i < incoming.tensors.size(); ++i) {
    // One that stays on this rank shares its memory with the sender's, but is a leaf.
    incoming.tensors[i] = incoming.tensors[i].detach();
    if (known->second[i].requires_grad) incoming.tensors[i].requires_grad_();
  }
  return incoming.tensors;
}

void StageMessages::send_gradients(int64_t from, const Tensors& gradients) {
  send(Direction::gradients, from, from - 1, gradients);
}

namespace {

TensorSpecs only_differentiable(const TensorSpecs& of) {
  TensorSpecs specs;
  for (const TensorSpec& spec : of) {
    if (spec.requires_grad) specs.push_back(spec);
  }
  return specs;
}

}  // namespace

Tensors StageMessages::take_gradients(int64_t to, const TensorSpecs& of) {
  const TensorSpecs specs = only_differentiable(of);
  if (specs.empty()) return {};
  Incoming incoming = take(Direction::gradients, to + 1, to, specs);
  incoming.work.wait();
  return incoming.tensors;
}

void StageMessages::collect(bool wait) {
  while (!sent_.empty() && (wait || sent_.front().work.is_done())) {
    if (wait) sent_.front().work.wait();
    sent_.pop_front();
  }
}

void StageMessages::drop() {
  to_this_rank_.clear();
  sent_.clear();
}

}  // namespace pacer::detail
