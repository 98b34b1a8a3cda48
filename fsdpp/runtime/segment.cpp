#include "fsdpp/runtime/segment.h"

#include <algorithm>

#include "fsdpp/runtime/backward_pass.h"

namespace fsdpp::runtime {
namespace {

thread_local Segment* innermost = nullptr;

}  // namespace

Segment* Segment::current() noexcept { return innermost; }

void Segment::returns_at(torch::autograd::Node* node) {
  node_ = node;
  std::vector<const BackwardPass*> told;
  for (const Entered& entered : units_) {
    const auto pass = entered.pass.lock();
    if (pass == nullptr || std::find(told.begin(), told.end(), pass.get()) != told.end()) continue;
    told.push_back(pass.get());
    pass->expect(shared_from_this());
  }
}

void Segment::done() {
  std::vector<const BackwardPass*> told;
  for (const Entered& entered : units_) {
    const auto pass = entered.pass.lock();
    if (pass == nullptr || std::find(told.begin(), told.end(), pass.get()) != told.end()) continue;
    told.push_back(pass.get());
    pass->returned(*this);
  }
}

std::vector<int> Segment::units_of(const BackwardPass& pass) const {
  std::vector<int> units;
  for (const Entered& entered : units_) {
    if (entered.pass.lock().get() == &pass) units.push_back(entered.unit);
  }
  return units;
}

SegmentScope::SegmentScope(Segment& segment) : around_(innermost), segment_(segment) { innermost = &segment; }

SegmentScope::~SegmentScope() {
  innermost = around_;
  if (around_ == nullptr) return;
  for (const Segment::Entered& entered : segment_.units_) around_->note(entered.pass, entered.unit);
}

}  // namespace fsdpp::runtime
