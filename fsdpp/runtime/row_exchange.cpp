#include "fsdpp/runtime/row_exchange.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;
constexpr const char* kRows = "embedding rows";
constexpr auto kIdBytes = static_cast<int64_t>(sizeof(int64_t));

}  // namespace

RowExchange::RowExchange(Peers& peers, Peers& everyone, Publisher& publisher, ParameterGroup& group,
                         std::shared_ptr<device::Ledger> ledger)
    : peers_(peers),
      everyone_(everyone),
      publisher_(publisher),
      group_(group),
      ledger_(std::move(ledger)),
      vocabulary_(group.parameters.front()->sizes.at(0)),
      dim_(group.parameters.front()->sizes.at(1)),
      row_bytes_(dim_ * group.element_bytes()) {}

RowExchange::~RowExchange() {
  if (memory_) ledger_->remove(kRows, bytes_);
}

int64_t* RowExchange::ids(int rank) const { return reinterpret_cast<int64_t*>(memory_->peer(rank)); }

std::byte* RowExchange::rows(int rank) const {
  return memory_->peer(rank) + round_up(capacity_ * kIdBytes, kAlignment);
}

device::RowTable RowExchange::table() const {
  device::RowTable table;
  for (int rank = 0; rank < peers_.ranks(); ++rank) table.shards[rank] = group_.published->part(rank);
  table.shard_elements = group_.layout->shard_numel();
  table.rows = vocabulary_;
  table.dim = dim_;
  table.element = element_of(group_.dtype);
  return table;
}

// Every rank asks for the same, in the same lookup: the largest need of any. What was taken so far moves
// along.
void RowExchange::reserve(int64_t rows_needed) {
  if (rows_needed <= capacity_) return;
  peers_.device().synchronize();
  everyone_.barrier("rows of " + group_.name);  // nobody reads the old memory any more
  const std::shared_ptr<comm::PeerMemory> old = memory_;
  const int own = peers_.rank();
  const int64_t* old_ids = old ? ids(own) : nullptr;
  const std::byte* old_rows = old ? rows(own) : nullptr;
  const int64_t bytes = round_up(rows_needed * kIdBytes, kAlignment) + rows_needed * row_bytes_;
  memory_ = peers_.allocate(static_cast<std::size_t>(bytes), kRows);
  if (old) ledger_->remove(kRows, bytes_);
  ledger_->add(kRows, bytes);
  capacity_ = rows_needed;
  bytes_ = bytes;
  if (taken_ == 0) return;
  peers_.device().copy(LaneKind::compute, "ids of " + group_.name, ids(own), old_ids,
                       static_cast<std::size_t>(taken_ * kIdBytes));
  peers_.device().copy(LaneKind::compute, "rows of " + group_.name, rows(own), old_rows,
                       static_cast<std::size_t>(taken_ * row_bytes_));
  peers_.device().synchronize();
}

// Of graphs that live and have not brought theirs; those that have been dropped (evaluations, forwards that
// raised) need no room.
int64_t RowExchange::rows_to_come(const std::shared_ptr<RowClaim>& claim) {
  claims_.push_back(claim);
  int64_t rows = 0;
  std::erase_if(claims_, [&](const std::weak_ptr<RowClaim>& known) {
    const auto alive = known.lock();
    if (alive == nullptr || alive->used) return true;
    rows += alive->rows;
    return false;
  });
  return rows;
}

at::Tensor RowExchange::gather(const at::Tensor& indices, const std::shared_ptr<RowClaim>& claim) {
  const at::Tensor flat = indices.reshape({-1}).contiguous();
  require(flat.scalar_type() == at::kLong && flat.device() == group_.place, "embedding ", group_.name,
          ": indices are ", flat.dtype().name(), " on ", flat.device().str(), "; expected int64 on ",
          group_.place.str());
  if (claim) {
    FSDPP_INVARIANT(taken_ == 0 || memory_, "rows without memory");
    claim->rows = flat.numel();
    const int64_t rows = taken_ + rows_to_come(claim);
    const std::vector<uint64_t> needs = everyone_.exchange_needs(static_cast<uint64_t>(rows));
    reserve(static_cast<int64_t>(*std::max_element(needs.begin(), needs.end())));
  }
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(dim_);
  at::Tensor result = at::empty(sizes, at::TensorOptions(group_.place).dtype(group_.dtype));
  publisher_.await(LaneKind::compute, group_);
  device::Access access;
  access.reads.push_back(bytes_at(flat.const_data_ptr(), flat.numel() * kIdBytes));
  for (int rank = 0; rank < peers_.ranks(); ++rank)
    access.reads.push_back(bytes_at(group_.published->part(rank), group_.shard_bytes()));
  access.writes.push_back(bytes_at(result.const_data_ptr(), flat.numel() * row_bytes_));
  peers_.device().run(LaneKind::compute, "look up " + group_.name, std::move(access),
                      [kernels = &peers_.device().kernels(), flat, result, table = table()] {
                        kernels->gather_rows(result.data_ptr(), flat.data_ptr<int64_t>(), flat.numel(),
                                             table);
                      });
  return result;
}

// Our ids and rows are ours to write once every rank has read the last ones.
void RowExchange::await_pulls() {
  if (sequence_ == 0) return;
  peers_.device().wait(LaneKind::compute, pulled_);
  peers_.wait_all(LaneKind::compute, "rows pulled " + group_.name, Channel::rows_pulled(group_.id),
                  sequence_);
}

void RowExchange::add(const at::Tensor& indices, const at::Tensor& gradients, RowClaim& claim) {
  const int64_t count = indices.numel();
  require(taken_ + count <= capacity_, "embedding ", group_.name, ": gradients of ", taken_ + count,
          " rows came before they were reduced, where ", capacity_,
          " were looked up: a graph was gone through twice (retain_graph); reduce in between (backward_dw(), "
          "or by hand), or shard with Options{.row_exchange_bytes = -1}");
  claim.used = true;
  if (taken_ == 0) await_pulls();
  const int own = peers_.rank();
  int64_t* id_place = ids(own) + taken_;
  std::byte* row_place = rows(own) + taken_ * row_bytes_;
  const at::Tensor given = gradients.to(group_.dtype).contiguous();
  const at::Tensor named = indices.contiguous();
  peers_.device().run(LaneKind::compute, "rows of " + group_.name,
                      {{bytes_at(named.const_data_ptr(), count * kIdBytes),
                        bytes_at(given.const_data_ptr(), count * row_bytes_)},
                       {bytes_at(id_place, count * kIdBytes), bytes_at(row_place, count * row_bytes_)}},
                      [=] {
                        at::from_blob(id_place, {count}, named.options()).copy_(named.view({-1}));
                        at::from_blob(row_place, {count, given.size(1)}, given.options()).copy_(given);
                      });
  taken_ += count;
}

void RowExchange::reduce(float* gradient, float scale, bool add_to_gradient) {
  device::Device& device = peers_.device();
  const int64_t shard = group_.layout->shard_numel();
  const int64_t first = peers_.rank() * shard;
  const device::RowSums owned{gradient, first, std::clamp<int64_t>(vocabulary_ * dim_ - first, 0, shard)};
  if (capacity_ > 0) name_nobody();
  const uint32_t sequence = ++sequence_;
  at::Tensor all = at::empty({peers_.ranks() * capacity_}, at::TensorOptions(group_.place).dtype(at::kLong));
  device.wait(LaneKind::reduce, device.record(LaneKind::compute));  // also: `all` may be re-used memory
  peers_.signal(LaneKind::reduce, "rows ready " + group_.name, Channel::rows_ready(group_.id), sequence);
  if (!add_to_gradient) {  // while the peers come
    device.fill(LaneKind::reduce, "zero " + group_.name, gradient, 0,
                static_cast<std::size_t>(owned.count) * sizeof(float));
  }
  peers_.wait_all(LaneKind::reduce, "rows ready " + group_.name, Channel::rows_ready(group_.id), sequence);
  if (capacity_ > 0) sum_owned(owned, all, scale);
  peers_.signal(LaneKind::reduce, "rows pulled " + group_.name, Channel::rows_pulled(group_.id), sequence);
  pulled_ = device.record(LaneKind::reduce);
  kept_ids_ = std::move(all);
  forget();
}

// All ranks exchange `capacity_` ids; those behind the taken ones name a row behind the last, which nobody
// owns.
void RowExchange::name_nobody() {
  if (taken_ == 0) await_pulls();
  if (taken_ == capacity_) return;
  int64_t* rest = ids(peers_.rank()) + taken_;
  const int64_t count = capacity_ - taken_;
  const at::TensorOptions options = at::TensorOptions(group_.place).dtype(at::kLong);
  peers_.device().run(LaneKind::compute, "no ids of " + group_.name, {{}, {bytes_at(rest, count * kIdBytes)}},
                      [=, nobody = vocabulary_] { at::from_blob(rest, {count}, options).fill_(nobody); });
}

// Sorted by row, and within a row by rank and place: the order in which they are added.
void RowExchange::sum_owned(const device::RowSums& owned, const at::Tensor& all, float scale) {
  device::RowGradients gradients;
  device::Access access;
  std::vector<device::Copy> copies;
  for (int rank = 0; rank < peers_.ranks(); ++rank) {
    copies.push_back({all.data_ptr<int64_t>() + rank * capacity_, ids(rank),
                      static_cast<std::size_t>(capacity_ * kIdBytes)});
    gradients.gradients[rank] = rows(rank);
    gradients.counts[rank] = capacity_;
    access.reads.push_back(bytes_at(rows(rank), capacity_ * row_bytes_));
  }
  gradients.ranks = peers_.ranks();
  gradients.dim = dim_;
  gradients.element = element_of(group_.dtype);
  device::Device& device = peers_.device();
  device.copy_all(LaneKind::reduce, "ids of " + group_.name, std::move(copies));
  const ByteRange sums = bytes_at(owned.sums, owned.count * static_cast<int64_t>(sizeof(float)));
  access.reads.push_back(bytes_at(all.const_data_ptr(), all.numel() * kIdBytes));
  access.reads.push_back(sums);
  access.writes.push_back(sums);
  device.run(LaneKind::reduce, "reduce " + group_.name, std::move(access), [=, kernels = &device.kernels()] {
    const auto [sorted, order] = at::sort(all, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    kernels->add_rows(owned, {sorted.data_ptr<int64_t>(), order.data_ptr<int64_t>(), all.numel()}, gradients,
                      scale, /*add_to_out=*/true);
  });
}

}  // namespace fsdpp::runtime
