#include "fsdpp/device/host.h"

#include "fsdpp/device/sanitizer.h"

namespace fsdpp::device {

void HostDevice::submit(const Operation& operation, Work work) {
  // Acquire and release touch no byte; everything else says what it touches, for work that TSan cannot see.
  if (operation.kind != OperationKind::acquire && operation.kind != OperationKind::release) {
    for (const ByteRange& range : operation.reads) announce_read(range.begin, range.size);
    for (const ByteRange& range : operation.writes) announce_write(range.begin, range.size);
  }
  if (work) work();
}

}  // namespace fsdpp::device
