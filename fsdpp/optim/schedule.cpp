#include "fsdpp/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "fsdpp/base/error.h"

namespace fsdpp::optim {

double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak, double min_ratio) {
  require(step >= 0, "warmup_cosine: step = ", step, "; expected 0 or more");
  require(warmup >= 0 && warmup <= total, "warmup_cosine: warmup = ", warmup,
          "; expected 0 to total = ", total);
  require(peak >= 0, "warmup_cosine: peak = ", peak, "; expected 0 or more");
  require(min_ratio >= 0 && min_ratio <= 1, "warmup_cosine: min_ratio = ", min_ratio, "; expected 0 to 1");
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const auto length = static_cast<double>(std::max<int64_t>(total - warmup - 1, 1));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / length);
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * progress));
  return peak * (min_ratio + (1 - min_ratio) * cosine);
}

}  // namespace fsdpp::optim
