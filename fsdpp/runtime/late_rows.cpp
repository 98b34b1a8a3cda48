#include "fsdpp/runtime/late_rows.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/runtime/reducer.h"

namespace fsdpp::runtime {
namespace {

using device::LaneKind;

// Rows of a product begin where a GEMM's tiles do, unless there are few.
constexpr int64_t kTile = 128;
constexpr int64_t kFewRows = 8 * kTile;
// Rows of a weight are worth a GEMM of their own from this part of the least group on.
constexpr int64_t kPartOfGroup = 32;

int64_t row_elements(const Parameter& parameter) {
  int64_t count = 1;
  for (std::size_t dim = 1; dim < parameter.sizes.size(); ++dim) count *= parameter.sizes[dim];
  return count;
}

const layout::Segment* segment_of(const Parameter& parameter, int rank) {
  for (const layout::Segment& segment : parameter.group->layout->segments(rank)) {
    if (segment.parameter == parameter.index) return &segment;
  }
  return nullptr;
}

}  // namespace

Rows LateRows::of(const Parameter& parameter) const {
  const ParameterGroup& group = *parameter.group;
  const bool summed_by_us = group.rows == nullptr && peers_.addressable() && peers_.ranks() > 1;
  if (at_least_ < 0 || !summed_by_us || group.rounds_sums() || parameter.sizes.size() < 2) return {};
  if (group.layout->full_numel() < at_least_) return {};
  const layout::Segment* segment = segment_of(parameter, peers_.rank());
  const int64_t row = row_elements(parameter);
  if (segment == nullptr || row == 0) return {};
  const int64_t end = segment->parameter_offset + segment->count;
  const int64_t tile = parameter.sizes[0] < kFewRows ? 1 : kTile;
  Rows rows{round_up((segment->parameter_offset + row - 1) / row, tile), end / row};
  if (rows.last < parameter.sizes[0]) rows.last = rows.last / tile * tile;
  return (rows.last - rows.first) * row < std::max<int64_t>(at_least_ / kPartOfGroup, 1) ? Rows{} : rows;
}

void LateRows::cut(const buffer::ReduceTarget& target, const Parameter& parameter,
                   std::vector<buffer::ReduceTarget>& targets) const {
  if (parameter.late.empty()) return targets.push_back(target);
  const Rows rows = of(parameter);
  const int64_t row = row_elements(parameter);
  const layout::Segment& whole = target.segment;
  const int64_t first = rows.first * row - whole.parameter_offset;
  const int64_t last = rows.last * row - whole.parameter_offset;
  const auto piece = [&](int64_t from, int64_t to, bool peers_only) {
    if (from == to) return;
    const layout::Segment part{whole.parameter, whole.parameter_offset + from, whole.shard_offset + from,
                               to - from};
    targets.push_back({part, static_cast<float*>(target.out) + from, target.add, peers_only});
  };
  piece(0, first, false);
  piece(first, last, true);
  piece(last, whole.count, false);
}

void LateRows::due(ParameterGroup& group, const std::vector<buffer::ReduceTarget>& targets,
                   const device::Event& reduced) {
  for (const buffer::ReduceTarget& target : targets) {
    if (!target.peers_only) continue;
    Parameter& parameter = *group.parameters[static_cast<std::size_t>(target.segment.parameter)];
    std::vector<int64_t> sizes = parameter.sizes;
    const Rows rows = of(parameter);
    sizes[0] = rows.last - rows.first;
    const at::Tensor gradient = parameter.shard.grad();
    auto keeper = std::make_shared<c10::Storage>(gradient.storage());
    due_.push_back({&parameter, rows, std::exchange(parameter.late, {}),
                    tensor_over(std::move(keeper), target.out, sizes, gradient.options()), gradient,
                    gradient._version(), target.add, reduced});
  }
}

void LateRows::run(const ParameterGroup* except) {
  std::vector<Due> later;
  for (Due& due : std::exchange(due_, {})) {
    if (due.parameter->group == except) {
      later.push_back(std::move(due));
    } else {
      write(due);
    }
  }
  due_ = std::move(later);
}

void LateRows::drop_stale() {
  std::erase_if(due_, [](const Due& due) {
    const at::Tensor& now = due.parameter->shard.grad();
    return !now.is_same(due.gradient) || now._version() != due.version;
  });
}

// The peers' sum alone is pulled as it is: the first writer scales both.
void LateRows::write(const Due& due) {
  device::Device& device = peers_.device();
  device.wait(LaneKind::compute, due.reduced);
  double kept = due.added ? 1.0 : scale_;
  for (const RowWriter& writer : due.writers) {
    const GradSink sink{due.view, GradSink::Mode::add, kept, scale_};
    run_writer(device, "late wgrad " + due.parameter->name, sink, due.rows, writer);
    kept = 1.0;
  }
}

}  // namespace fsdpp::runtime
