#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdpp/device/ledger.h"
#include "fsdpp/runtime/parameter_group.h"
#include "fsdpp/runtime/peers.h"
#include "fsdpp/runtime/publisher.h"
#include "fsdpp/runtime/sink.h"

namespace fsdpp::runtime {

/// A large embedding's weights and gradients, exchanged by rows: in forward the rows that are looked up come
/// from their owners' published shards; in backward each rank publishes the rows' gradients with their ids,
/// and owners add those they own, per row in rank order. No rank ever holds the whole table or its whole
/// gradient.
///
/// Of a group with one parameter [rows, dim] whose gradient is sharded and whose ranks address each other's
/// memory.
class RowExchange {
 public:
  /// `everyone`: all ranks of the model, which agree on sizes; `peers` are those that share the table.
  RowExchange(Peers& peers, Peers& everyone, Publisher& publisher, ParameterGroup& group,
              std::shared_ptr<device::Ledger> ledger);
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// Rows `indices` [...] (int64) of the published weights: [..., dim], on the compute lane. Collective with
  /// a `claim` (null: no gradient will come): all ranks look up as often, with any number of indices.
  [[nodiscard]] at::Tensor gather(const at::Tensor& indices, const std::shared_ptr<RowClaim>& claim);

  /// Takes one lookup's gradients `rows` [n, dim] for `indices` [n] into what this backward publishes. Throws
  /// UsageError when there is no room: a retained graph came again before an exchange.
  void add(const at::Tensor& indices, const at::Tensor& rows, RowClaim& claim);

  /// Takes part in the exchange of one backward: sums the rows that this rank owns into `gradient`
  /// (shard_numel() fp32 elements of the gradient shard), or adds to it. On the reduce lane, all ranks in the
  /// same order of reduces.
  void reduce(float* gradient, float scale, bool add_to_gradient);

  /// A backward begins: forget_last() drops what is taken from here on.
  void begin() noexcept { before_ = taken_; }
  void forget_last() noexcept { taken_ = before_; }
  /// Gradients that were taken and not exchanged are dropped.
  void forget() noexcept { taken_ = before_ = 0; }

 private:
  [[nodiscard]] int64_t rows_to_come(const std::shared_ptr<RowClaim>& claim);
  void reserve(int64_t rows_needed);
  void await_pulls();
  void name_nobody();
  void sum_owned(const device::RowSums& owned, const at::Tensor& all, float scale);
  [[nodiscard]] int64_t* ids(int rank) const;
  [[nodiscard]] std::byte* rows(int rank) const;
  [[nodiscard]] device::RowTable table() const;

  Peers& peers_;
  Peers& everyone_;
  Publisher& publisher_;
  ParameterGroup& group_;
  std::shared_ptr<device::Ledger> ledger_;
  int64_t vocabulary_;
  int64_t dim_;
  int64_t row_bytes_;

  std::shared_ptr<comm::PeerMemory> memory_;  // per rank: `capacity_` ids, then as many rows
  int64_t capacity_ = 0;                      // rows per rank and backward, equal on all ranks
  int64_t bytes_ = 0;
  int64_t taken_ = 0;                            // rows whose gradients have come since the last exchange
  int64_t before_ = 0;                           // of them, those that had when the last backward began
  std::vector<std::weak_ptr<RowClaim>> claims_;  // of lookups whose gradients may come
  uint32_t sequence_ = 0;                        // of the last exchange
  device::Event pulled_;                         // on the reduce lane: our own pull of it
  at::Tensor kept_ids_;                          // of the last exchange: the reduce lane may still read them
};

}  // namespace fsdpp::runtime
