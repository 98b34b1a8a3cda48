#include "fsdpp/comm/signals.h"

#include "fsdpp/base/error.h"
#include "fsdpp/comm/shared_counter.h"

namespace fsdpp::comm {
namespace {

std::size_t board_bytes(std::size_t channels) {
  require(channels > 0, "a signal board needs at least one channel, got none");
  return channels * sizeof(SharedCounter);
}

}  // namespace

SignalBoard::SignalBoard(PeerBackend& backend, std::string group, std::vector<std::string> names,
                         std::chrono::milliseconds timeout)
    : backend_(backend),
      group_(std::move(group)),
      names_(std::move(names)),
      timeout_(timeout),
      memory_(backend.allocate(board_bytes(names_.size()), "signals of group \"" + group_ + "\"", timeout)) {}

SignalBoard::~SignalBoard() = default;

SharedCounter& SignalBoard::counter(int rank, int channel) const {
  FSDPP_INVARIANT(channel >= 0 && channel < channels(), "channel ", channel, " of a board with ", channels());
  return reinterpret_cast<SharedCounter*>(memory_->peer(rank))[channel];
}

void SignalBoard::signal(int channel, uint32_t sequence) {
  SharedCounter& own = counter(backend_.rank(), channel);
  const uint32_t before = value_of(own);
  FSDPP_INVARIANT(sequence == before + 1, "rank ", backend_.rank(), " of group \"", group_, "\" signals ",
                  sequence, " on channel \"", names_[static_cast<std::size_t>(channel)],
                  "\", which stands at ", before, ": a signal was lost or doubled");
  raise(own, sequence);
}

uint32_t SignalBoard::value(int rank, int channel) const { return value_of(counter(rank, channel)); }

int SignalBoard::channels() const noexcept { return static_cast<int>(names_.size()); }

void SignalBoard::wait(int rank, int channel, uint32_t sequence) {
  if (value(rank, channel) < sequence) {
    backend_.before_wait([=, this] { return value(rank, channel) >= sequence; },
                         names_[static_cast<std::size_t>(channel)]);
  }
  const WaitOutcome outcome = wait_for(counter(rank, channel), sequence, timeout_,
                                       [this, rank] { return backend_.trouble_with(rank); });
  if (outcome.result == WaitResult::reached) return;
  const int named = backend_.rank_in_whole(rank);
  const std::string awaited =
      text("rank ", backend_.rank_in_whole(backend_.rank()), " of group \"", group_, "\" waited for rank ",
           named, " to reach ", sequence, " on channel \"", names_[static_cast<std::size_t>(channel)],
           "\" (seen ", outcome.seen, ", timeout ", timeout_.count(), " ms)");
  if (outcome.result == WaitResult::interrupted) throw Interrupted("asked to stop while " + awaited);
  backend_.give_up_on(rank);
  throw PeerError(
      text("lost rank ", named, ": ",
           outcome.trouble ? outcome.trouble->what : "it runs but did not come in time", "; ", awaited),
      named, group_, sequence);
}

}  // namespace fsdpp::comm
