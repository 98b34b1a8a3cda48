#include "fsdpp/data/permutation.h"

#include <stdexcept>

#include "fsdpp/base/error.h"
#include "fsdpp/data/hash.h"

namespace fsdpp::data {
namespace {

// Four rounds are indistinguishable from random for large halves (Luby, Rackoff 1988); the rest is for small
// ones.
constexpr uint64_t kRounds = 8;

}  // namespace

Permutation::Permutation(int64_t size, uint64_t key) : size_(size), key_(mix(key)) {
  require(size >= 1 && size <= int64_t{1} << 62, "a permutation of ", size, " numbers: give 1 to 2^62");
  while (uint64_t{1} << (2 * half_bits_) < static_cast<uint64_t>(size)) ++half_bits_;
}

int64_t Permutation::operator()(int64_t position) const {
  if (position < 0 || position >= size_) {
    throw std::out_of_range(text("position ", position, " of a permutation of ", size_));
  }
  auto value = static_cast<uint64_t>(position);
  do {  // the network is a bijection, so this walk ends, at the latest where it began
    value = encrypt(value);
  } while (value >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(value);
}

uint64_t Permutation::encrypt(uint64_t value) const noexcept {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (mix(mix(key_ + round) ^ right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

}  // namespace fsdpp::data
