#include "fsdpp/runtime/reducer.h"

#include <utility>
#include <vector>

#include "fsdpp/runtime/parameter.h"

namespace fsdpp::runtime {

namespace {

device::Access access_of(const GradSink& sink) {
  const ByteRange range = bytes_at(sink.view.const_data_ptr(), static_cast<int64_t>(sink.view.nbytes()));
  device::Access access{{}, {range}};
  if (sink.mode == GradSink::Mode::add) access.reads.push_back(range);
  return access;
}

}  // namespace

void announce_write(device::Device& device, const Parameter& parameter, const GradSink& sink) {
  device.announce(device::LaneKind::compute, "wgrad " + parameter.name, access_of(sink));
}

void run_writer(device::Device& device, const std::string& name, const GradSink& sink, Rows rows,
                const RowWriter& write) {
  device.run(device::LaneKind::compute, name, access_of(sink), [=] {
    const at::NoGradGuard no_grad;
    write(sink, rows.first, rows.last);
  });
}

void write_rows(device::Device& device, const Parameter& parameter, const GradSink& sink, Rows rows,
                const RowWriter& write) {
  if (rows.empty()) return;
  GradSink part = sink;
  part.view = sink.view.narrow(0, rows.first, rows.last - rows.first);
  run_writer(device, "wgrad " + parameter.name, part, rows, write);
}

}  // namespace fsdpp::runtime
