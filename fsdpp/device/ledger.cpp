#include "fsdpp/device/ledger.h"

#include <algorithm>

#include "fsdpp/base/error.h"

namespace fsdpp::device {

void Ledger::add(const std::string& purpose, int64_t bytes) {
  by_purpose_[purpose] += bytes;
  current_ += bytes;
  peak_ = std::max(peak_, current_);
}

void Ledger::remove(const std::string& purpose, int64_t bytes) noexcept {
  if (bytes == 0) return;
  auto entry = by_purpose_.find(purpose);
  const int64_t held = entry == by_purpose_.end() ? 0 : entry->second;
  FSDPP_INVARIANT(bytes <= held, "ledger: ", bytes, " bytes taken back for \"", purpose, "\", of which only ",
                  held, " are held");
  entry->second -= bytes;
  if (entry->second == 0) by_purpose_.erase(entry);
  current_ -= bytes;
}

}  // namespace fsdpp::device
