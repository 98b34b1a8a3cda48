#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdpp::comm {

/// One allocation per rank of a group that every rank of the group can address.
///
/// Unmapped when the last owner lets go on each rank; nothing is left behind in the system, also after
/// SIGKILL.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }  // per rank, as asked for
  /// First byte of `rank`'s allocation in this process's address space, page aligned, zero-filled at first.
  /// Throws std::out_of_range unless `rank` is in the group.
  [[nodiscard]] std::byte* peer(int rank) const { return bases_.at(static_cast<std::size_t>(rank)); }

 protected:
  PeerMemory(std::size_t bytes, std::vector<std::byte*> bases) : bytes_(bytes), bases_(std::move(bases)) {}

 private:
  std::size_t bytes_;
  std::vector<std::byte*> bases_;
};

/// Why a peer does not answer.
struct Trouble {
  std::string what;    // for messages: "process 4711 is gone", "process 4711 is stopped"
  bool final = false;  // it can never answer: waiting longer is useless
};

/// How the ranks of one group reach each other's memory. One object per rank; not shared between threads.
class PeerBackend {
 public:
  virtual ~PeerBackend() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int ranks() const noexcept = 0;
  [[nodiscard]] virtual std::string describe() const = 0;  // "threads", "shared memory"
  /// What `rank` is called in messages: of a part of a group, its rank in the whole.
  [[nodiscard]] virtual int rank_in_whole(int rank) const noexcept { return rank; }

  /// Collective: every rank calls it with the same `bytes` (> 0), in the same order. `purpose` is for
  /// messages. Throws UsageError when ranks ask for different sizes, EnvironmentError naming the needed and
  /// the available bytes and the remedy when memory is short (never a bus error later), PeerError when a rank
  /// does not come.
  [[nodiscard]] virtual std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose,
                                                             std::chrono::milliseconds timeout) = 0;

  /// Why `rank` does not answer, or nothing when it seems alive. Cheap enough to call ten times a second.
  [[nodiscard]] virtual std::optional<Trouble> trouble_with(int rank) const = 0;

  /// Called once this rank gives up on `rank` after a timeout: on the same host a stopped process is ended,
  /// so that it does not stay behind. Does nothing for threads.
  virtual void give_up_on(int rank) noexcept = 0;

  /// Called before a wait that has to wait: ranks that run by turns let the others go on until `reached`.
  virtual void before_wait(const std::function<bool()>& reached, const std::string& what) {
    static_cast<void>(reached), static_cast<void>(what);
  }
};

}  // namespace fsdpp::comm
