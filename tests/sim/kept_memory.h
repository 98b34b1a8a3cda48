#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <vector>

namespace fsdpp::test {

/// While it lives, libtorch's host memory is used once: two tensors never share an address, so that a
/// schedule names each by its own. (A device's allocator knows the lanes; the host's hands out what it
/// likes.)
class KeptMemory final : public c10::Allocator {
 public:
  KeptMemory() : before_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~KeptMemory() override { c10::SetCPUAllocator(before_, kPriority); }
  KeptMemory(const KeptMemory&) = delete;
  KeptMemory& operator=(const KeptMemory&) = delete;

  c10::DataPtr allocate(size_t bytes) override {
    const std::lock_guard lock(mutex_);
    kept_.push_back(before_->allocate(bytes));
    return {kept_.back().get(), kept_.back().device()};
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    before_->copy_data(target, source, bytes);
  }

 private:
  static constexpr uint8_t kPriority = 100;

  c10::Allocator* before_;
  std::mutex mutex_;
  std::vector<c10::DataPtr> kept_;
};

}  // namespace fsdpp::test
