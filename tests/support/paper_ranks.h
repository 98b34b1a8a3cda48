#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "fsdpp/device/device.h"
#include "fsdpp/trace/merge.h"
#include "fsdpp/trace/recorder.h"

namespace fsdpp::test {

/// Lanes on which nothing runs: for schedules that are only written down.
class PaperDevice final : public device::Device {
 protected:
  void submit(const device::Operation&, Work) override {}
};

/// Several ranks' schedules on paper, in one address space of named places.
class PaperRanks {
 public:
  explicit PaperRanks(int ranks) : recorders_(static_cast<std::size_t>(ranks)) {
    for (trace::Recorder& recorder : recorders_) {
      devices_.push_back(std::make_unique<PaperDevice>());
      devices_.back()->observe(&recorder);
    }
  }
  [[nodiscard]] PaperDevice& operator[](int rank) { return *devices_[static_cast<std::size_t>(rank)]; }

  /// `size` bytes from byte `first` of an address space without memory.
  [[nodiscard]] static ByteRange bytes(std::size_t first, std::size_t size) {
    return {reinterpret_cast<const void*>(std::size_t{0x10000} + first), size};
  }

  [[nodiscard]] std::vector<std::vector<device::Operation>> traces() const {
    std::vector<std::vector<device::Operation>> traces;
    for (const trace::Recorder& recorder : recorders_) traces.push_back(recorder.operations());
    return traces;
  }
  [[nodiscard]] std::vector<trace::Hazard> check() const { return trace::check_traces(traces()); }

 private:
  std::vector<trace::Recorder> recorders_;
  std::vector<std::unique_ptr<PaperDevice>> devices_;
};

inline device::Access reads(ByteRange range) { return {{range}, {}}; }
inline device::Access writes(ByteRange range) { return {{}, {range}}; }
/// A copy on paper.
inline void copy(device::Device& device, device::LaneKind lane, const std::string& name, ByteRange target,
                 ByteRange source) {
  device.copy(lane, name, const_cast<void*>(target.begin), source.begin, target.size);
}

inline void expect_clean(const std::vector<trace::Hazard>& hazards) {
  for (const trace::Hazard& hazard : hazards) ADD_FAILURE() << hazard.text;
}

/// There is a hazard, all are of `kind`, and the first one's text has all `parts`.
inline void expect_hazard(const std::vector<trace::Hazard>& hazards, trace::HazardKind kind,
                          std::initializer_list<const char*> parts) {
  ASSERT_FALSE(hazards.empty()) << "nothing was reported, expected: " << trace::to_string(kind);
  for (const trace::Hazard& hazard : hazards) EXPECT_EQ(hazard.kind, kind) << hazard.text;
  for (const char* part : parts) {
    EXPECT_NE(hazards.front().text.find(part), std::string::npos)
        << "no \"" << part << "\" in: " << hazards.front().text;
  }
}

}  // namespace fsdpp::test
