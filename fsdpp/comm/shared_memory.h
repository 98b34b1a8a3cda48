#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fsdpp/comm/backend.h"
#include "fsdpp/comm/introduction.h"

namespace fsdpp::comm {

struct Desk;
struct Note;

/// Memory that other processes of this host can map: a file without a name (memfd), so that nothing can stay
/// behind.
class Segment {
 public:
  /// `bytes` (> 0) zero-filled bytes, all present: room that is not there is an EnvironmentError here and
  /// never a bus error later. `purpose` is for messages.
  [[nodiscard]] static Segment create(std::size_t bytes, const std::string& purpose);

  /// Maps the segment that `owner` made and has under number `descriptor`, which it must keep open meanwhile.
  /// Throws EnvironmentError when the process is gone, the file is not ours to open or not `bytes` large.
  [[nodiscard]] static Segment open(const ProcessId& owner, int descriptor, std::size_t bytes,
                                    const std::string& purpose);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  /// Closes the file; the mapping stays.
  void close_descriptor() noexcept;

 private:
  Segment(int descriptor, std::size_t bytes) : descriptor_(descriptor), bytes_(bytes) {}
  void map(const std::string& purpose);

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Ranks that are processes of one host. They agree on allocations through notes in memory of their own, not
/// through the store: that is gone, or stopped, with the process that serves it.
class SharedMemoryBackend final : public PeerBackend {
 public:
  /// The memory for this process's notes, whose descriptor belongs into its Introduction.
  [[nodiscard]] static Segment make_desk();

  /// Collective: returns once every rank of `all` (in rank order, this one's included) has opened the desks
  /// of all. Throws PeerError when one does not come, EnvironmentError when a desk cannot be opened.
  SharedMemoryBackend(int rank, std::span<const Introduction> all, Segment own_desk, std::string group,
                      std::chrono::milliseconds timeout);
  ~SharedMemoryBackend() override;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return static_cast<int>(processes_.size()); }
  [[nodiscard]] std::string describe() const override { return "shared memory"; }
  [[nodiscard]] std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose,
                                                     std::chrono::milliseconds timeout) override;
  [[nodiscard]] std::optional<Trouble> trouble_with(int rank) const override;
  void give_up_on(int rank) noexcept override;

 private:
  [[nodiscard]] Desk& desk(int rank) const;
  /// Every rank's note, once all are there. Throws when a rank does not come, or a note tells of an error.
  [[nodiscard]] std::vector<Note> exchange(const Note& note, const std::string& purpose,
                                           std::chrono::milliseconds timeout);
  void report_lost_peers(const std::string& message) const;
  void check_asks(const std::vector<Note>& asks) const;

  int rank_;
  std::string group_;
  std::vector<ProcessId> processes_;  // per rank
  std::vector<Segment> desks_;        // per rank
  uint32_t notes_ = 0;                // posted by this rank
};

}  // namespace fsdpp::comm
