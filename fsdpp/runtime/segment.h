#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <vector>

namespace fsdpp::runtime {

class BackwardPass;

/// A part of a forward that ran without gradients and runs again, inside the backward of `node`, in a graph
/// task of its own (reentrant recompute): the graph of the backward around it shows that node, not the
/// weights behind it, so the units entered are noted here.
class Segment : public std::enable_shared_from_this<Segment> {
 public:
  /// The innermost segment whose forward is under way in this thread, or null.
  [[nodiscard]] static Segment* current() noexcept;

  /// `unit` of the model behind `pass` was entered.
  void note(const std::weak_ptr<BackwardPass>& pass, int unit) { units_.push_back({pass, unit}); }
  /// Its forward is over: it comes back when `node` runs.
  void returns_at(torch::autograd::Node* node);
  /// All of its backward has run.
  void done();

  [[nodiscard]] torch::autograd::Node* node() const noexcept { return node_; }
  /// Units of `pass` in it, as often as they were entered.
  [[nodiscard]] std::vector<int> units_of(const BackwardPass& pass) const;

 private:
  friend class SegmentScope;
  struct Entered {
    std::weak_ptr<BackwardPass> pass;
    int unit;
  };
  std::vector<Entered> units_;
  torch::autograd::Node* node_ = nullptr;
};

/// While it lives, units entered in this thread are noted in `segment`, and in those around it.
class SegmentScope {
 public:
  explicit SegmentScope(Segment& segment);
  ~SegmentScope();
  SegmentScope(const SegmentScope&) = delete;
  SegmentScope& operator=(const SegmentScope&) = delete;

 private:
  Segment* around_;
  Segment& segment_;
};

}  // namespace fsdpp::runtime
