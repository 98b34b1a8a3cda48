#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

namespace fsdpp::runtime {

/// Where a layer's backward puts a weight gradient.
struct GradSink {
  enum class Mode {
    overwrite,  // first contribution: whatever is there is garbage (a GEMM with beta = 0)
    add,        // view = kept * view + scale * contribution
  };
  at::Tensor
      view;  // the weight's sizes, contiguous, in the slot, fp32 or (wire_dtype, accumulation_dtype) bf16
  Mode mode = Mode::overwrite;
  double kept = 1;   // beta, and
  double scale = 1;  // alpha: other than 1 only where contribute() hands the sink out, to add
};

/// Rows [first, last) of a weight.
struct Rows {
  int64_t first = 0;
  int64_t last = 0;
  [[nodiscard]] bool empty() const noexcept { return first >= last; }
};

/// Writes rows [first, last) of a contribution into `sink`, whose view has these rows only, as its mode says.
using RowWriter = std::function<void(const GradSink& sink, int64_t first, int64_t last)>;

/// A lookup of rows whose gradients may come. Its graph keeps it: as long as it lives there is room for them.
struct RowClaim {
  int64_t rows = 0;
  bool used = false;  // they have come
};

/// A sharded weight as a fused layer sees it. A custom autograd function that writes weight gradients itself
/// takes one in forward (sink_of), keeps it with its saved tensors, and in backward:
///
///   owner->ensure_resident();                      // before it reads the weight
///   if (auto sink = owner->open()) {               // else: return the weight gradient to autograd as usual
///     write or add into sink->view;                // as sink->mode says, on the compute lane
///     owner->report();                             // exactly once per open()
///   }                                              // and return an undefined weight gradient
///
/// One that can write any rows of its contribution by themselves (a GEMM) does better, and for contributions
/// of millions of elements should, to call
///
///   if (owner->contribute([=](const GradSink& sink, int64_t first, int64_t last) { ... })) return undefined;
///
/// The weight's gradient accumulator still runs once per graph task, after all uses; that is when the runtime
/// counts the weight as done.
class SinkOwner {
 public:
  virtual ~SinkOwner() = default;

  /// Gathers the weight's unit if it is not gathered (a departure from the schedule, counted).
  virtual void ensure_resident() = 0;

  /// The sink, or nothing when this backward must not be fused: fusion is off, the weight's accumulator does
  /// not run in this graph task (autograd::grad, inputs = ...), or the user put hooks on the weight.
  /// Throws UsageError under create_graph (a gradient written into memory has no graph) and when the sharded
  /// model is gone.
  [[nodiscard]] virtual std::optional<GradSink> open() = 0;

  /// The contribution promised by open() is written.
  virtual void report() = 0;

  /// Has `write` write the contribution to a weight [rows, ...], in pieces that together are all its rows,
  /// each once: some now, some perhaps later in the same backward, onto what came from the peers, each as an
  /// operation of the compute lane. `write` keeps alive what it reads, and nothing may change that before the
  /// backward ends. False: this backward must not be fused, nothing was or will be written. Throws as open()
  /// does.
  [[nodiscard]] virtual bool contribute(const RowWriter& write);

  /// True when the weight [rows, dim] is exchanged by rows: a lookup then takes gather_rows() instead of
  /// reading it, and in backward add_rows() instead of open().
  [[nodiscard]] virtual bool exchanges_rows() const noexcept { return false; }
  /// Rows `indices` [...] (int64) of the weight: [..., dim]. `claim`: a new one, which is filled in, or null
  /// when no gradient will come.
  [[nodiscard]] virtual at::Tensor gather_rows(const at::Tensor& indices,
                                               const std::shared_ptr<RowClaim>& claim);
  /// Takes the gradients `rows` [n, dim] of rows `indices` [n], which were looked up with `claim`. False:
  /// this backward must not be fused, see open(). Throws as open() does, and UsageError when the same graph
  /// brings more than there is room for, before what it brought first was exchanged.
  [[nodiscard]] virtual bool add_rows(const at::Tensor& indices, const at::Tensor& rows, RowClaim& claim);
};

/// Makes `owner` the one that fused layers ask for a sink for `weight`, until it is gone or unregistered. One
/// table for the process, used by all rank threads.
void register_sink(const at::Tensor& weight, std::weak_ptr<SinkOwner> owner);
void unregister_sink(const at::Tensor& weight) noexcept;

/// The owner of `weight`, when it is a parameter of a sharded model or was registered; else null.
[[nodiscard]] std::shared_ptr<SinkOwner> sink_of(const at::Tensor& weight);

}  // namespace fsdpp::runtime
