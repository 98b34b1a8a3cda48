#include "fsdpp/comm/peer_group.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/part.h"

namespace fsdpp::comm {
namespace {

enum Channel : int { kBarrier, kExchange };

/// What one rank says in one exchange. Two per rank, used in turn: a rank that writes for exchange n + 2 has
/// seen every peer enter n + 1, hence finish reading n.
struct Letter {
  uint64_t count;  // may exceed the room: then there are no values, and every rank throws
  std::array<double, PeerGroup::kMaxExchange> values;
};

Letter& letter(const PeerMemory& mailbox, int rank, uint32_t exchange) {
  return reinterpret_cast<Letter*>(mailbox.peer(rank))[exchange % 2];
}

/// The host's lanes: what hosts can address is all they need.
class HostLanes final : public LaneTransport {
 public:
  explicit HostLanes(PeerGroup& group) : group_(group) {}
  std::shared_ptr<PeerMemory> allocate(std::size_t bytes, const std::string& purpose) override {
    return group_.allocate(bytes, purpose);
  }
  std::unique_ptr<LaneSignals> signals(std::vector<std::string> names, const std::string& purpose) override {
    return group_.signals(std::move(names), purpose);
  }
  [[nodiscard]] std::string describe() const override { return group_.describe(); }

 private:
  PeerGroup& group_;
};

}  // namespace

std::unique_ptr<PeerGroup> PeerGroup::part(const std::vector<int>& members, const std::string& name) {
  auto group = std::make_unique<PeerGroup>(std::make_unique<PartBackend>(*backend_, members), name, timeout_);
  group->members_ = members;
  if (auto lanes = lanes_->for_part(*group)) group->set_lanes(std::move(lanes));
  return group;
}

std::shared_ptr<PeerMemory> PeerGroup::view(std::shared_ptr<PeerMemory> whole) const {
  return members_.empty() ? whole : part_of(std::move(whole), members_);
}

int PeerGroup::rank_in_whole(int rank) const noexcept { return backend_->rank_in_whole(rank); }

PeerGroup::PeerGroup(std::unique_ptr<PeerBackend> backend, std::string name,
                     std::chrono::milliseconds timeout)
    : backend_(std::move(backend)), name_(std::move(name)), timeout_(timeout) {
  board_ = std::make_unique<SignalBoard>(*backend_, name_, std::vector<std::string>{"barrier", "exchange"},
                                         timeout_);
  mailbox_ = backend_->allocate(2 * sizeof(Letter), "mailbox of group \"" + name_ + "\"", timeout_);
  lanes_ = std::make_unique<HostLanes>(*this);
}

PeerGroup::~PeerGroup() = default;

int PeerGroup::rank() const noexcept { return backend_->rank(); }
int PeerGroup::ranks() const noexcept { return backend_->ranks(); }
const std::string& PeerGroup::name() const noexcept { return name_; }
std::chrono::milliseconds PeerGroup::timeout() const noexcept { return timeout_; }
std::string PeerGroup::describe() const { return backend_->describe(); }

std::shared_ptr<PeerMemory> PeerGroup::allocate(std::size_t bytes, const std::string& purpose) {
  return backend_->allocate(bytes, purpose, timeout_);
}

std::unique_ptr<SignalBoard> PeerGroup::signals(std::vector<std::string> names, const std::string& purpose) {
  if (!purpose.empty()) {
    for (std::string& name : names) name = purpose + ": " + name;
  }
  return std::make_unique<SignalBoard>(*backend_, name_, std::move(names), timeout_);
}

void PeerGroup::barrier() {
  ++arrivals_;
  board_->signal(kBarrier, arrivals_);
  for (int peer = 0; peer < ranks(); ++peer) board_->wait(peer, kBarrier, arrivals_);
}

std::vector<double> PeerGroup::exchange(std::span<const double> values) {
  const uint32_t number = exchanges_++;
  Letter& own = letter(*mailbox_, rank(), number);
  own.count = values.size();
  if (values.size() <= kMaxExchange) std::copy(values.begin(), values.end(), own.values.begin());
  board_->signal(kExchange, number + 1);

  std::vector<double> all;
  all.reserve(values.size() * static_cast<std::size_t>(ranks()));
  std::string wrong;  // thrown after every rank was heard: all ranks then fail alike
  for (int peer = 0; peer < ranks(); ++peer) {
    board_->wait(peer, kExchange, number + 1);
    const Letter& theirs = letter(*mailbox_, peer, number);
    if (theirs.count > kMaxExchange) {
      wrong = text("rank ", peer, " gave ", theirs.count, " values to one exchange of group \"", name_,
                   "\", at most ", kMaxExchange, " fit: exchange them in parts, or through allocate()");
    } else if (theirs.count != values.size()) {
      if (wrong.empty()) {
        wrong = text("ranks gave different numbers of values to one exchange of group \"", name_, "\": rank ",
                     rank(), " ", values.size(), ", rank ", peer, " ", theirs.count);
      }
    } else {
      all.insert(all.end(), theirs.values.begin(),
                 theirs.values.begin() + static_cast<std::ptrdiff_t>(theirs.count));
    }
  }
  require(wrong.empty(), wrong);
  return all;
}

std::vector<double> PeerGroup::sum(std::span<const double> values) {
  const std::vector<double> all = exchange(values);
  std::vector<double> total(values.size(), 0.0);
  for (std::size_t i = 0; i < all.size(); ++i) total[i % values.size()] += all[i];
  return total;
}

}  // namespace fsdpp::comm
