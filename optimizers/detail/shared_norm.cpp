#include <pacer/optimizers/detail/shared_norm.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include <pacer/core/reduction_order.h>
#include <pacer/device/detail/stream.h>
#include <pacer/optimizers/detail/tensor_sums.h>
#include <pacer/optimizers/detail/tile_loop.h>

namespace pacer::detail {

size_t SharedNorm::table_of(kernels::GradientType type) {
  size_t t = 0;
  while (t < tables_.size() && tables_[t].type != type) ++t;
  if (t == tables_.size()) tables_.push_back({type, {}, {}, {}, {}});
  return t;
}

void SharedNorm::add(kernels::GradientType type, const at::Tensor& own, const std::vector<int64_t>& bounds) {
  const size_t table = table_of(type);
  tables_[table].own.push_back(own);
  tables_[table].gradients.host().push_back({nullptr, 0});
  for (int64_t begin = 0; begin < bounds.back(); begin += kReductionUnit) add_unit(table, own, bounds, begin);
}

void SharedNorm::add_unit(size_t table, const at::Tensor& own, const std::vector<int64_t>& bounds,
                          int64_t begin) {
  const int64_t end = std::min(begin + kReductionUnit, bounds.back());
  // What of the unit a rank has.
  const auto begin_on = [&](int rank) { return std::max(begin, bounds[static_cast<size_t>(rank)]); };
  const auto count_on = [&](int rank) {
    return std::max<int64_t>(0, std::min(end, bounds[static_cast<size_t>(rank) + 1]) - begin_on(rank));
  };
  const int rank = ranks_->rank(), owner = owner_of(bounds, begin);
  const int64_t place_in_own = begin_on(rank) - bounds[static_cast<size_t>(rank)], count = count_on(rank);
  const int64_t place = shared_sums_.add_unit(owner);
  if (owner == rank) {
    auto& gradients = tables_[table].gradients.host();
    Tile unit{static_cast<uint32_t>(gradients.size() - 1), static_cast<uint32_t>(end - begin), place_in_own};
    if (count < end - begin) {
      CutReductionUnit cut{table, gradients.size(), end - begin, {own, place_in_own, count}, {}};
      for (int other = rank + 1; other < ranks_->world_size(); ++other) {
        if (count_on(other) > 0) cut.rest.emplace_back(other, count_on(other));
      }
      cut_units_.push_back(std::move(cut));
      unit.tensor = static_cast<uint32_t>(gradients.size());
      unit.offset = 0;
      tables_[table].own.emplace_back();
      gradients.push_back({nullptr, 0});  // no unit of this gradient after a cut one begins here
    }
    tables_[table].units.host().push_back(unit);
    tables_[table].places.host().push_back(static_cast<uint32_t>(place));
  } else if (count > 0) {
    sent_.emplace_back(Piece{own, place_in_own, count}, owner);
  }
}

// Where nobody asks for a sum, there is no memory for it.
void SharedNorm::prepare() {
  if (!own_sums_.defined()) make_memory();
  for (Table& table : tables_) {
    for (size_t i = 0; i < table.own.size(); ++i) {
      if (table.own[i].defined()) table.gradients.set(i, {table.own[i].const_data_ptr(), 0});
    }
    table.gradients.send(device_);
  }
}

void SharedNorm::make_memory() {
  own_sums_ = at::empty({1, shared_sums_.own()}, at::TensorOptions().dtype(at::kDouble).device(device_));
  for (const CutReductionUnit& cut : cut_units_) {
    whole_units_.push_back(at::empty({cut.count}, cut.beginning.own.options()));
    tables_[cut.table].gradients.host()[cut.gradient].gradient = whole_units_.back().const_data_ptr();
  }
  for (Table& table : tables_) {
    table.units.send(device_);
    table.places.send(device_);
  }
}

void SharedNorm::exchange_pieces() {
  std::vector<Message> messages;
  for (const auto& [piece, peer] : sent_) messages.push_back(Message::send(piece.elements(), peer));
  for (size_t i = 0; i < cut_units_.size(); ++i) {
    const CutReductionUnit& cut = cut_units_[i];
    int64_t end = cut.beginning.count;
    whole_units_[i].narrow(0, 0, end).copy_(cut.beginning.elements());
    for (const auto& [rank, count] : cut.rest) {
      messages.push_back(Message::receive(whole_units_[i].narrow(0, end, count), rank));
      end += count;
    }
  }
  ranks_->send_receive(messages).wait();
}

void SharedNorm::add_squares(Table& table, double* sums) {
  const auto count = static_cast<int64_t>(table.units.host().size());
  if (count == 0) return;
  if (device_.is_cuda()) {
    kernels::sum_of_squares_cuda(table.type, table.units.pointer(), count, table.gradients.pointer(),
                                 table.places.pointer(), sums, current_stream(device_));
    return;
  }
  for_each_tile(table.units.host(), [&](int64_t i) {
    const Tile& unit = table.units.host()[static_cast<size_t>(i)];
    sums[table.places.host()[static_cast<size_t>(i)]] =
        unit_sum_of_squares(table.type, table.gradients.host()[unit.tensor].gradient, unit);
  });
}

at::Tensor SharedNorm::sums() {
  prepare();
  exchange_pieces();
  for (Table& table : tables_) add_squares(table, own_sums_.mutable_data_ptr<double>());
  return shared_sums_.gather(own_sums_);
}

}  // namespace pacer::detail
