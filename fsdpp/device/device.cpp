#include "fsdpp/device/device.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "fsdpp/device/sanitizer.h"

namespace fsdpp::device {

Memory Device::allocate(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  return host_memory(bytes, std::move(purpose), std::move(ledger));
}

Memory Device::allocate_on_host(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  return host_memory(bytes, std::move(purpose), std::move(ledger));
}

const Kernels& Device::kernels() const { return host_kernels(); }

void Device::copy_bytes(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) std::memcpy(copy.target, copy.source, copy.bytes);
}

void Device::fill_bytes(void* target, int value, std::size_t bytes) { std::memset(target, value, bytes); }

void Device::synchronize() {
  for (const LaneKind lane : {LaneKind::compute, LaneKind::gather, LaneKind::reduce})
    wait(LaneKind::host, record(lane));
  drain();
}

void Device::observe(Observer* observer) { observers_.push_back(observer); }

void Device::unobserve(Observer* observer) { std::erase(observers_, observer); }

void Device::issue(Operation operation, Work work) {
  operation.position = ++issued_[static_cast<std::size_t>(operation.lane)];
  if (operation.kind == OperationKind::record) operation.event.position = operation.position;
  for (Observer* observer : observers_) observer->on_operation(operation);
  submit(operation, std::move(work));
}

Event Device::record(LaneKind lane) {
  Operation operation{.kind = OperationKind::record, .lane = lane};
  operation.event = {lane, 0};
  issue(std::move(operation), nullptr);
  return {lane, issued_[static_cast<std::size_t>(lane)]};
}

void Device::wait(LaneKind lane, const Event& event) {
  if (event.position == 0) return;
  Operation operation{.kind = OperationKind::wait, .lane = lane};
  operation.event = event;
  issue(std::move(operation), nullptr);
}

void Device::copy(LaneKind lane, std::string name, void* target, const void* source, std::size_t bytes) {
  copy_all(lane, std::move(name), {{target, source, bytes}});
}

void Device::copy_all(LaneKind lane, std::string name, std::vector<Copy> copies) {
  std::erase_if(copies, [](const Copy& copy) { return copy.bytes == 0; });
  if (copies.empty()) return;
  Operation operation{.kind = OperationKind::copy, .lane = lane, .name = std::move(name)};
  for (const Copy& copy : copies) {
    operation.reads.push_back({copy.source, copy.bytes});
    operation.writes.push_back({copy.target, copy.bytes});
  }
  issue(std::move(operation), [this, copies = std::move(copies)] { copy_bytes(copies); });
}

void Device::upload(LaneKind lane, std::string name, void* target, const void* source, std::size_t bytes) {
  if (bytes == 0) return;
  Operation operation{.kind = OperationKind::copy, .lane = lane, .name = std::move(name)};
  operation.writes = {{target, bytes}};
  const auto* first = static_cast<const std::byte*>(source);
  issue(std::move(operation),
        [this, target, kept = std::vector<std::byte>(first, first + bytes)] { upload_bytes(target, kept); });
}

void Device::upload_bytes(void* target, const std::vector<std::byte>& kept) {
  std::memcpy(target, kept.data(), kept.size());
}

void Device::fill(LaneKind lane, std::string name, void* target, int value, std::size_t bytes) {
  if (bytes == 0) return;
  Operation operation{.kind = OperationKind::fill, .lane = lane, .name = std::move(name)};
  operation.writes = {{target, bytes}};
  issue(std::move(operation), [=, this] { fill_bytes(target, value, bytes); });
}

void Device::run(LaneKind lane, std::string name, Access access, Work work) {
  Operation operation{.kind = OperationKind::run, .lane = lane, .name = std::move(name)};
  operation.reads = std::move(access.reads);
  operation.writes = std::move(access.writes);
  issue(std::move(operation), std::move(work));
}

void Device::signal(LaneKind lane, std::string name, int channel, uint32_t sequence, Work work) {
  Operation operation{.kind = OperationKind::signal, .lane = lane, .name = std::move(name)};
  operation.channel = channel;
  operation.sequence = sequence;
  issue(std::move(operation), std::move(work));
}

void Device::wait_signal(LaneKind lane, std::string name, int peer, int channel, uint32_t sequence,
                         Work work) {
  Operation operation{.kind = OperationKind::wait_signal, .lane = lane, .name = std::move(name)};
  operation.peer = peer;
  operation.channel = channel;
  operation.sequence = sequence;
  issue(std::move(operation), std::move(work));
}

void Device::acquire(LaneKind lane, std::string name, ByteRange range) {
  if (range.size == 0) return;
  Operation operation{.kind = OperationKind::acquire, .lane = lane, .name = std::move(name)};
  operation.writes = {range};
  issue(std::move(operation), [range] { unpoison(range.begin, range.size); });
}

void Device::release(LaneKind lane, std::string name, ByteRange range) {
  if (range.size == 0) return;
  Operation operation{.kind = OperationKind::release, .lane = lane, .name = std::move(name)};
  operation.writes = {range};
  issue(std::move(operation), [range] { poison(range.begin, range.size); });
}

void Device::announce(LaneKind lane, std::string name, Access access) {
  run(lane, std::move(name), std::move(access), nullptr);
}

void Device::free(LaneKind lane, std::string name, ByteRange range) {
  if (range.size == 0) return;
  Operation operation{.kind = OperationKind::free, .lane = lane, .name = std::move(name)};
  operation.writes = {range};
  issue(std::move(operation), [range] { unpoison(range.begin, range.size); });
}

void Device::collective(LaneKind lane, std::string name, Collective collective, Access access, Work work) {
  Operation operation{.kind = OperationKind::collective, .lane = lane, .name = std::move(name)};
  operation.reads = std::move(access.reads);
  operation.writes = std::move(access.writes);
  operation.collective = std::make_shared<const Collective>(std::move(collective));
  issue(std::move(operation), std::move(work));
}

void Device::rejoin(LaneKind lane, std::string name) {
  issue({.kind = OperationKind::rejoin, .lane = lane, .name = std::move(name)}, nullptr);
}

void Device::move(std::string name, State from, State to) {
  Operation operation{.kind = OperationKind::move, .lane = LaneKind::host, .name = std::move(name)};
  operation.from = from;
  operation.to = to;
  issue(std::move(operation), nullptr);
}

}  // namespace fsdpp::device
