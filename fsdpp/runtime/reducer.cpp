#include "fsdpp/runtime/reducer.h"

#include <utility>
#include <vector>

#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

void announce_write(device::Device& device, const Parameter& parameter, const GradSink& sink) {
  const ByteRange range = bytes_at(sink.view.const_data_ptr(), static_cast<int64_t>(sink.view.nbytes()));
  device::Access access{{}, {range}};
  if (sink.mode == GradSink::Mode::add) access.reads.push_back(range);
  device.announce(device::LaneKind::compute, "wgrad " + parameter.name, std::move(access));
}

void write_rows(device::Device& device, const Parameter& parameter, const GradSink& sink, int64_t first,
                int64_t last, const RowWriter& write) {
  if (first == last) return;
  GradSink part = sink;
  part.view = sink.view.narrow(0, first, last - first);
  announce_write(device, parameter, part);
  write(part, first, last);
}

}  // namespace fsdpp::runtime
