#include "fsdpp/comm/part.h"

#include <algorithm>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::comm {
namespace {

class PartMemory final : public PeerMemory {
 public:
  PartMemory(std::shared_ptr<PeerMemory> whole, const std::vector<int>& members)
      : PeerMemory(whole->bytes(), bases(*whole, members)), whole_(std::move(whole)) {}

 private:
  static std::vector<std::byte*> bases(const PeerMemory& whole, const std::vector<int>& members) {
    std::vector<std::byte*> result;
    for (const int rank : members) result.push_back(whole.peer(rank));
    return result;
  }
  std::shared_ptr<PeerMemory> whole_;
};

std::string list(const std::vector<int>& members) {
  std::string out;
  for (const int member : members) out += (out.empty() ? "" : ", ") + std::to_string(member);
  return out;
}

}  // namespace

std::shared_ptr<PeerMemory> part_of(std::shared_ptr<PeerMemory> memory, const std::vector<int>& members) {
  return std::make_shared<PartMemory>(std::move(memory), members);
}

PartBackend::PartBackend(PeerBackend& whole, std::vector<int> members)
    : whole_(whole), members_(std::move(members)) {
  const bool increasing =
      std::adjacent_find(members_.begin(), members_.end(), std::greater_equal<>()) == members_.end();
  require(increasing && !members_.empty() && members_.front() >= 0 && members_.back() < whole_.ranks(),
          "a part of a group has the members ", list(members_), "; expected increasing ranks from 0 to ",
          whole_.ranks() - 1);
  const auto own = std::find(members_.begin(), members_.end(), whole_.rank());
  require(own != members_.end(), "a part of a group has the members ", list(members_), ", but rank ",
          whole_.rank(), " makes it; expected it among them");
  rank_ = static_cast<int>(own - members_.begin());
}

}  // namespace fsdpp::comm
