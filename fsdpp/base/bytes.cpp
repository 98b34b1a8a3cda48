#include "fsdpp/base/bytes.h"

#include <array>
#include <cstdio>

namespace fsdpp {

std::string human_bytes(int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 48> out{};
  std::snprintf(out.data(), out.size(), unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return out.data();
}

}  // namespace fsdpp
