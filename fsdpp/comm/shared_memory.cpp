#include "fsdpp/comm/shared_memory.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/host_memory.h"
#include "fsdpp/comm/shared_counter.h"

namespace fsdpp::comm {

/// What a rank tells its peers in one step of an allocation.
struct Note {
  uint64_t bytes = 0;      // asked for
  uint64_t available = 0;  // as this rank sees it
  std::array<char, 128> limit{};
  std::array<char, 256> purpose{};
  int32_t descriptor = -1;
  std::array<char, 768> error{};  // not empty: the step failed on this rank
};

/// Where a rank leaves its notes. Two, used in turn: a rank that writes note n + 2 has seen every peer's note
/// n + 1, which each wrote after it had read all notes n.
struct Desk {
  SharedCounter posted;
  std::array<Note, 2> notes;
};

namespace {

template <std::size_t N>
void write(std::array<char, N>& to, const std::string& from) {
  const std::size_t count =
      std::min(from.size(), N - 1);  // what is longer is cut: these are texts for people
  std::copy_n(from.begin(), count, to.begin());
  to[count] = '\0';
}

class SharedMemory final : public PeerMemory {
 public:
  SharedMemory(std::size_t bytes, std::vector<Segment> segments)
      : PeerMemory(bytes, starts(segments)), segments_(std::move(segments)) {}

 private:
  static std::vector<std::byte*> starts(const std::vector<Segment>& segments) {
    std::vector<std::byte*> bases;
    for (const Segment& segment : segments) bases.push_back(segment.data());
    return bases;
  }
  std::vector<Segment> segments_;
};

// Per rank: this rank's own segment, and the peers' by the numbers they gave.
std::vector<Segment> open_all(int rank, Segment own, const std::vector<ProcessId>& processes,
                              const std::vector<int>& descriptors, std::size_t bytes,
                              const std::string& purpose) {
  std::vector<Segment> segments;
  for (std::size_t peer = 0; peer < processes.size(); ++peer) {
    segments.push_back(peer == static_cast<std::size_t>(rank)
                           ? std::move(own)
                           : Segment::open(processes[peer], descriptors[peer], bytes, purpose));
  }
  return segments;
}

}  // namespace

Segment SharedMemoryBackend::make_desk() { return Segment::create(sizeof(Desk), "notes between ranks"); }

SharedMemoryBackend::SharedMemoryBackend(int rank, std::span<const Introduction> all, Segment own_desk,
                                         std::string group, std::chrono::milliseconds timeout)
    : rank_(rank), group_(std::move(group)) {
  const std::string purpose = "notes between ranks of group \"" + group_ + "\"";
  std::vector<int> descriptors;
  for (const Introduction& introduction : all) {
    processes_.push_back(introduction.process);
    descriptors.push_back(introduction.descriptor);
  }
  try {
    desks_ = open_all(rank, std::move(own_desk), processes_, descriptors, sizeof(Desk), purpose);
  } catch (const EnvironmentError& error) {
    report_lost_peers(error.what());
    throw;
  }
  static_cast<void>(exchange(Note{}, purpose, timeout));
  desks_[static_cast<std::size_t>(rank)].close_descriptor();
}

SharedMemoryBackend::~SharedMemoryBackend() = default;

Desk& SharedMemoryBackend::desk(int rank) const {
  return *reinterpret_cast<Desk*>(desks_.at(static_cast<std::size_t>(rank)).data());
}

std::vector<Note> SharedMemoryBackend::exchange(const Note& note, const std::string& purpose,
                                                std::chrono::milliseconds timeout) {
  const uint32_t number = ++notes_;
  Desk& own = desk(rank_);
  own.notes[number % 2] = note;
  raise(own.posted, number);
  std::vector<Note> all;
  for (int peer = 0; peer < ranks(); ++peer) {
    const WaitOutcome outcome =
        wait_for(desk(peer).posted, number, timeout, [this, peer] { return trouble_with(peer); });
    if (outcome.result == WaitResult::reached) {
      all.push_back(desk(peer).notes[number % 2]);
      continue;
    }
    const std::string awaited =
        text("rank ", rank_, " of group \"", group_, "\" waited for rank ", peer, " to allocate ", purpose,
             " (step ", number, ", seen ", outcome.seen, ", timeout ", timeout.count(), " ms)");
    if (outcome.result == WaitResult::interrupted) throw Interrupted("asked to stop while " + awaited);
    give_up_on(peer);
    throw PeerError(
        text("lost rank ", peer, ": ",
             outcome.trouble ? outcome.trouble->what : "it runs but did not come in time", "; ", awaited),
        peer, group_, number);
  }
  for (std::size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].error[0] == '\0') continue;
    report_lost_peers(all[peer].error.data());
    throw EnvironmentError(text("rank ", peer, ": ", all[peer].error.data()));
  }
  return all;
}

// A step may have failed on a rank because another one is gone: then that one is to be named.
void SharedMemoryBackend::report_lost_peers(const std::string& message) const {
  for (int peer = 0; peer < ranks(); ++peer) {
    const std::optional<Trouble> trouble = trouble_with(peer);
    if (trouble && trouble->final) {
      throw PeerError(text("lost rank ", peer, ": ", trouble->what, "; ", message), peer, group_, notes_);
    }
  }
}

void SharedMemoryBackend::check_asks(const std::vector<Note>& asks) const {
  const Note& first = asks.front();
  AvailableMemory least;
  for (std::size_t peer = 0; peer < asks.size(); ++peer) {
    require(asks[peer].bytes == first.bytes,
            "ranks ask for different sizes in one collective allocation: rank 0 ", first.bytes, " bytes for ",
            first.purpose.data(), ", rank ", peer, " ", asks[peer].bytes, " bytes for ",
            asks[peer].purpose.data());
    if (asks[peer].available < least.bytes) least = {asks[peer].available, asks[peer].limit.data()};
  }
  check_memory(whole_pages(first.bytes), ranks(), first.purpose.data(), least);
}

std::shared_ptr<PeerMemory> SharedMemoryBackend::allocate(std::size_t bytes, const std::string& purpose,
                                                          std::chrono::milliseconds timeout) {
  // Everybody asks before anybody takes: what is available is measured while all of it is still there.
  Note note;
  const AvailableMemory available = available_memory();
  note.bytes = bytes;
  note.available = available.bytes;
  write(note.limit, available.limit);
  write(note.purpose, purpose);
  check_asks(exchange(note, purpose, timeout));

  std::optional<Segment> own;
  try {
    own = Segment::create(bytes, purpose);
    note.descriptor = own->descriptor();
  } catch (const EnvironmentError& error) {
    write(note.error, error.what());
  }
  std::vector<int> descriptors;
  for (const Note& theirs : exchange(note, purpose, timeout)) descriptors.push_back(theirs.descriptor);

  std::vector<Segment> segments;
  try {
    segments = open_all(rank_, std::move(*own), processes_, descriptors, bytes, purpose);
  } catch (const EnvironmentError& error) {
    write(note.error, error.what());
  }
  static_cast<void>(exchange(note, purpose, timeout));
  segments[static_cast<std::size_t>(rank_)].close_descriptor();  // every peer has mapped it
  return std::make_shared<SharedMemory>(bytes, std::move(segments));
}

std::optional<Trouble> SharedMemoryBackend::trouble_with(int rank) const {
  if (rank == rank_) return std::nullopt;
  return trouble_with_process(processes_.at(static_cast<std::size_t>(rank)));
}

void SharedMemoryBackend::give_up_on(int rank) noexcept {
  if (rank >= 0 && rank < ranks() && rank != rank_)
    end_if_stopped(processes_[static_cast<std::size_t>(rank)]);
}

}  // namespace fsdpp::comm
