#include "fsdpp/comm/c10d_store.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"

namespace fsdpp::comm {
namespace {

constexpr int kServing = 0;  // the rank
const char* const kHost = "127.0.0.1";
constexpr std::chrono::milliseconds kGlance(1);

std::atomic<int> next_number{0};  // of a group of c10d's; all its ranks take the largest of theirs

c10d::TCPStoreOptions options_of(const PeerGroup& group, bool serves) {
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = serves;
  options.waitWorkers = false;
  options.numWorkers = group.ranks();
  options.timeout = group.timeout();
  return options;
}

}  // namespace

C10dStore::C10dStore(PeerGroup& group, std::chrono::milliseconds patience)
    : group_(group),
      patience_(patience),
      left_(group.signals({"left the store"}, "the end of c10d's store")) {
  const bool serves = group.rank() == kServing;
  c10d::TCPStoreOptions options = options_of(group, serves);
  c10::intrusive_ptr<c10d::TCPStore> store;
  if (serves) store = c10::make_intrusive<c10d::TCPStore>(kHost, options);
  const std::vector<double> ports =
      group.exchange(std::vector<double>{serves ? 1.0 * store->getPort() : 0.0});
  if (!serves) {
    options.port = static_cast<uint16_t>(ports[kServing]);
    store = c10::make_intrusive<c10d::TCPStore>(kHost, options);
  }
  store_ = std::move(store);
}

C10dStore::~C10dStore() {
  if (std::uncaught_exceptions() > 0 && !interrupted()) {
    tell();
  } else {
    leave();
  }
}

c10::intrusive_ptr<c10d::Store> C10dStore::part(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
}

void C10dStore::tell() noexcept {
  if (!std::exchange(told_, true)) left_->signal(0, 1);
}

void C10dStore::leave() noexcept {
  if (told_) return;
  tell();
  if (group_.rank() != kServing) return;
  const auto end = std::chrono::steady_clock::now() + patience_;
  while (!others_left() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(kGlance);
}

bool C10dStore::has_left(int rank_in_whole) const {
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    if (group_.rank_in_whole(rank) == rank_in_whole) return left_->value(rank, 0) > 0;
  }
  return false;
}

bool C10dStore::others_left() const {
  for (int rank = 0; rank < group_.ranks(); ++rank) {
    if (left_->value(rank, 0) > 0) continue;
    const std::optional<Trouble> trouble = group_.trouble_with(rank);
    if (!trouble || !trouble->final) return false;
  }
  return true;
}

std::string new_c10d_name(PeerGroup& group) {
  const std::vector<double> all = group.exchange(std::vector<double>{1.0 * next_number.load()});
  const int number = static_cast<int>(*std::max_element(all.begin(), all.end()));
  int next = next_number.load();
  while (next <= number && !next_number.compare_exchange_weak(next, number + 1)) continue;
  return text("fsdpp/", group.name(), "@", group.rank_in_whole(0), "/", number);
}

}  // namespace fsdpp::comm
