#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "fsdpp/device/kernels.h"
#include "fsdpp/device/memory.h"
#include "fsdpp/device/operation.h"

namespace fsdpp::device {

/// What an operation reads and writes.
struct Access {
  std::vector<ByteRange> reads;
  std::vector<ByteRange> writes;
};

/// Bytes to copy from one place to another.
struct Copy {
  void* target;
  const void* source;
  std::size_t bytes;
};

/// The lanes of one rank. All asynchronous work of the runtime passes through these verbs, so all of it can
/// be traced and checked. One object per rank, used by the rank's thread.
///
/// A backend implements the virtual functions. Every verb announces its operation to the observers first.
class Device {
 public:
  using Work = std::function<void()>;

  virtual ~Device() = default;
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  /// `observer` sees every operation from now on and must outlive the device or be removed by unobserve().
  void observe(Observer* observer);
  void unobserve(Observer* observer);

  /// Marks the point that `lane` has reached.
  Event record(LaneKind lane);
  /// Later operations of `lane` run after `event`.
  void wait(LaneKind lane, const Event& event);
  /// Copies `bytes` from `source` to `target` on `lane`. The two must not overlap.
  void copy(LaneKind lane, std::string name, void* target, const void* source, std::size_t bytes);
  /// Several copies as one operation, in any order among themselves.
  void copy_all(LaneKind lane, std::string name, std::vector<Copy> copies);
  /// Copies from the host's ordinary memory, which is the caller's again when this returns.
  void upload(LaneKind lane, std::string name, void* target, const void* source, std::size_t bytes);
  /// Sets `bytes` at `target` to `value` on `lane`.
  void fill(LaneKind lane, std::string name, void* target, int value, std::size_t bytes);
  /// Runs `work`, which touches what `access` says, on `lane`.
  void run(LaneKind lane, std::string name, Access access, Work work);
  /// Raises counter `channel` to `sequence` (by `work`) after the earlier operations of `lane`.
  void signal(LaneKind lane, std::string name, int channel, uint32_t sequence, Work work);
  /// Later operations of `lane` run after `peer` raised `channel` to `sequence` (`work` waits for it).
  void wait_signal(LaneKind lane, std::string name, int peer, int channel, uint32_t sequence, Work work);
  /// Memory at `range` begins or ends a life, in the order of `lane`. In ASan builds it is poisoned in
  /// between.
  void acquire(LaneKind lane, std::string name, ByteRange range);
  void release(LaneKind lane, std::string name, ByteRange range);
  /// Names an access by work that runs elsewhere in the order of `lane` (a GEMM inside libtorch).
  void announce(LaneKind lane, std::string name, Access access);
  /// `range` goes back to an allocator that hands it out again in the order of `lane` (the system's: the
  /// host's): all that used it must come before. What is done there from now on is its next owner's.
  void free(LaneKind lane, std::string name, ByteRange range);
  /// Runs `work`, which takes this rank's part in `collective` and touches what `access` says, on `lane`.
  void collective(LaneKind lane, std::string name, Collective collective, Access access, Work work);
  /// Says that `lane` is behind everything the other lanes were given: a checker looks whether it is.
  void rejoin(LaneKind lane, std::string name);
  /// Says that the unit or slot `name` goes from one state to another: a checker looks whether it may.
  void move(std::string name, State from, State to);

  /// Index of the GPU that the lanes run on, or -1: the host.
  [[nodiscard]] virtual int gpu() const noexcept { return -1; }
  /// True when an operation is over as soon as its verb returns: what it wrote can be read by the host.
  [[nodiscard]] virtual bool runs_inline() const noexcept { return false; }
  /// Zero-filled memory that the lanes can address; none for 0 bytes. Throws NoRoomError, naming purpose and
  /// bytes, when there is no room.
  [[nodiscard]] virtual Memory allocate(std::size_t bytes, std::string purpose,
                                        std::shared_ptr<Ledger> ledger);
  /// Zero-filled memory of the host that the lanes copy from and to without the host (pinned where they are a
  /// GPU's). Throws as allocate() does.
  [[nodiscard]] virtual Memory allocate_on_host(std::size_t bytes, std::string purpose,
                                                std::shared_ptr<Ledger> ledger);
  /// Kernels to be called inside `work`: they run on its lane.
  [[nodiscard]] virtual const Kernels& kernels() const;
  /// The host waits until every lane has run what it was given.
  void synchronize();
  /// Called once per unit and pass: the host waits while it is too far ahead of the compute lane.
  virtual void stay_near() {}

 protected:
  /// Runs `work` in the order of operation.lane, now or later.
  virtual void submit(const Operation& operation, Work work) = 0;
  /// What synchronize() does beside waiting for an event at the end of each lane.
  virtual void drain() {}
  /// What copy() and fill() do when their turn comes.
  virtual void copy_bytes(const std::vector<Copy>& copies);
  /// `kept`: the uploaded bytes; the device may read them until the lane has come to the copy, or keep them
  /// itself.
  virtual void upload_bytes(void* target, const std::vector<std::byte>& kept);
  virtual void fill_bytes(void* target, int value, std::size_t bytes);

 private:
  void issue(Operation operation, Work work);

  std::vector<Observer*> observers_;
  std::array<uint64_t, kLaneKinds> issued_{};  // operations per lane
};

}  // namespace fsdpp::device
