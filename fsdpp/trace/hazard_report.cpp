// How the checker words what it found.
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/trace/hazard_checker.h"

namespace fsdpp::trace {
namespace {

std::string bytes_of(const ShadowMemory::Finding& finding) {
  return text(finding.bytes, " bytes at ", reinterpret_cast<const void*>(finding.begin));
}

}  // namespace

const char* to_string(HazardKind kind) noexcept {
  switch (kind) {
    case HazardKind::unordered:
      return "unordered accesses";
    case HazardKind::host_early:
      return "host before the event";
    case HazardKind::early_reuse:
      return "memory reused too early";
    case HazardKind::early_release:
      return "memory released too early";
    case HazardKind::use_after_release:
      return "use after release";
    case HazardKind::unwritten_read:
      return "read before any write";
    case HazardKind::life:
      return "wrong life";
    case HazardKind::not_rejoined:
      return "lane not rejoined";
    case HazardKind::collective:
      return "collectives differ";
    case HazardKind::state:
      return "wrong state";
    case HazardKind::signal:
      return "wrong signal";
    case HazardKind::event:
      return "no such event";
  }
  return "?";
}

// "reduce #7 ... of rank 1 must wait for compute #12 ... of rank 0: no wait or record orders them"
std::string HazardChecker::order_missing(const ShadowMemory::Finding& finding) {
  const int first = finding.first.thread;
  const int second = finding.second.thread;
  return text("must wait for ", log_.describe(finding.first), ": no wait or record orders them (the ",
              device::to_string(lane_of(second)), " lane of rank ", rank_of(second), " knows the ",
              device::to_string(lane_of(first)), " lane of rank ", rank_of(first), " up to #",
              queue(second).known()[first], "); both use ", bytes_of(finding));
}

void HazardChecker::report_memory(const ShadowMemory::Finding& finding) {
  std::string what;
  switch (finding.kind) {
    case HazardKind::use_after_release:
      what = text(
          "uses ", bytes_of(finding), ", which ", log_.describe(finding.first), " released",
          queue(finding.second.thread).covers(finding.first) ? " before" : "; no wait or record orders them");
      break;
    case HazardKind::unwritten_read:
      what = text("reads ", bytes_of(finding), " that nothing has written",
                  finding.first.position == 0 ? "" : " since " + log_.describe(finding.first));
      break;
    case HazardKind::life:
      what = text(finding.why, ", ", bytes_of(finding),
                  finding.first.position == 0 ? "" : ": see " + log_.describe(finding.first));
      break;
    default:
      what = order_missing(finding);
  }
  report(finding.kind, finding.first, finding.second, what);
}

void HazardChecker::report(HazardKind kind, const Epoch& first, const Epoch& second,
                           const std::string& what) {
  const auto pair = std::tuple(kind, first.thread, first.position, second.thread, second.position);
  if (!known_.insert(pair).second) return;
  ++found_;
  if (hazards_.size() >= kMost) return;
  hazards_.push_back({kind, first, second, text(to_string(kind), ": ", log_.describe(second), " ", what)});
}

}  // namespace fsdpp::trace
