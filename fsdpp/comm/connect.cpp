#include "fsdpp/comm/connect.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/introduction.h"
#include "fsdpp/comm/rendezvous.h"
#include "fsdpp/comm/shared_memory.h"

namespace fsdpp::comm {
namespace {

using std::chrono::milliseconds;

constexpr const char* kGroup = "world";

/// The introductions of all ranks, through the job's store.
class Meeting {
 public:
  Meeting(Rendezvous& store, const Introduction& own, milliseconds timeout)
      : store_(store), own_(own), timeout_(timeout), end_(std::chrono::steady_clock::now() + timeout) {}

  /// In rank order. Throws PeerError naming who did not come, or who was lost while this rank waited.
  std::vector<Introduction> meet() {
    introduce();
    for (int peer = 0; peer < own_.ranks; ++peer) {
      const std::optional<std::string> note = read(peer);
      if (!note) throw_missing(peer);
      known_.push_back(introduction_from(*note));
    }
    return known_;
  }

  /// Called before this rank fails for a reason that every rank will see: the one that serves the store stays
  /// until the others have seen it too, else they would report the loss of the store.
  void part() {
    constexpr milliseconds kPatience(2000);
    try {
      store_.set(text("parted/", own_.rank), "1");
      if (!store_.serves()) return;
      const auto end = std::chrono::steady_clock::now() + kPatience;
      for (int peer = 0; peer < own_.ranks; ++peer) {
        static_cast<void>(store_.get(text("parted/", peer), left_until(end)));
      }
    } catch (const std::runtime_error&) {  // the error on its way is the one to report
    }
  }

 private:
  static milliseconds left_until(std::chrono::steady_clock::time_point end) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - std::chrono::steady_clock::now());
    return std::max(left, milliseconds(0));
  }
  [[nodiscard]] std::string key(int rank) const { return text("rank/", rank); }

  void introduce() {
    const std::string note = to_text(own_);
    const std::string held = store_.claim(key(own_.rank), note);
    if (held == note) return;
    const Introduction other = introduction_from(held);
    throw EnvironmentError(text("rank ", own_.rank, " is already taken in ", store_.describe(),
                                " by process ", other.process.pid, " of host \"", other.host.name,
                                "\": another job uses this store; set MASTER_PORT to a free port"));
  }

  std::optional<std::string> read(int peer) {
    try {
      return store_.get(key(peer), left_until(end_));
    } catch (const EnvironmentError& error) {
      // The store goes with the process that serves it: then its rank is to be named, if it is known by now.
      for (const Introduction& one : known_) {
        const std::optional<Trouble> trouble = trouble_with_process(one.process);
        if (!trouble || one.host != own_.host) continue;
        end_if_stopped(one.process);
        throw PeerError(text("lost rank ", one.rank, ": ", trouble->what, "; ", error.what()), one.rank,
                        kGroup, 0);
      }
      throw;
    }
  }

  [[noreturn]] void throw_missing(int first) {
    std::string missing = std::to_string(first);
    for (int peer = first + 1; peer < own_.ranks; ++peer) {
      if (!store_.try_get(key(peer))) missing += text(", ", peer);
    }
    throw PeerError(
        text("rank ", own_.rank, " waited for ", own_.ranks, " ranks to connect to group \"", kGroup,
             "\" through ", store_.describe(), "; missing after ", timeout_.count(), " ms: rank ", missing,
             "; check that all ", own_.ranks, " processes were started and are alive"),
        first, kGroup, 0);
  }

  Rendezvous& store_;
  Introduction own_;
  milliseconds timeout_;
  std::chrono::steady_clock::time_point end_;
  std::vector<Introduction> known_;
};

void check(const Identity& identity) {
  require(identity.ranks > 0 && identity.rank >= 0 && identity.rank < identity.ranks, "rank ", identity.rank,
          " of ", identity.ranks, " is none: ranks count from 0");
  if (identity.ranks == 1) return;
  require(!identity.address.empty(), "the address of the store is missing, which ", identity.ranks,
          " ranks need: set MASTER_ADDR");
  require(identity.port > 0 && identity.port < 65536, "the port of the store is ", identity.port,
          ", expected 1 to 65535: set MASTER_PORT");
}

}  // namespace

std::unique_ptr<PeerGroup> connect(const Identity& identity, milliseconds timeout) {
  check(identity);
  // A later connection of the same processes must not read the notes of an earlier one in an agent's store.
  static std::atomic<int> connections{0};
  const int connection = connections.fetch_add(1);

  Segment desk = SharedMemoryBackend::make_desk();
  const Introduction own{identity.rank, identity.ranks, own_host(), own_process(), desk.descriptor()};
  std::unique_ptr<Rendezvous> store;  // until every rank has opened every other's memory
  std::vector<Introduction> all{own};
  if (identity.ranks > 1) {
    store = open_rendezvous(identity, text(kGroup, "/", connection), timeout);
    Meeting meeting(*store, own, timeout);
    all = meeting.meet();
    try {
      require_one_host(all);
    } catch (const UsageError&) {
      meeting.part();
      throw;
    }
  }
  auto backend = std::make_unique<SharedMemoryBackend>(identity.rank, all, std::move(desk), kGroup, timeout);
  return std::make_unique<PeerGroup>(std::move(backend), kGroup, timeout);
}

std::unique_ptr<PeerGroup> connect(milliseconds timeout) {
  return connect(identity_from_environment(), timeout);
}

}  // namespace fsdpp::comm
