#include "fsdpp/device/memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"
#include "fsdpp/device/sanitizer.h"

namespace fsdpp::device {
namespace {

void* map_pages(std::size_t bytes, int protection, int flags, const std::string& purpose) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (address == MAP_FAILED) {
    throw NoRoomError(text("no room for ", human_bytes(static_cast<int64_t>(bytes)), " of ", purpose, ": ",
                           std::strerror(errno), "; use more ranks, a smaller model, or a larger machine"));
  }
  return address;
}

// The fault handler may only read plain lock-free data: a fixed table, written under a mutex by everyone
// else.
struct ForbiddenEntry {
  std::atomic<uintptr_t> first{0};
  std::atomic<uintptr_t> end{0};
  std::array<char, 240> message{};
};
constexpr int kTableSize = 4096;  // units of all models of a process; beyond it a fault is not explained
std::array<ForbiddenEntry, kTableSize> forbidden_table;
std::mutex forbidden_mutex;
struct sigaction previous_action;

void write_all(const char* bytes, std::size_t size) {
  while (size > 0) {
    const ssize_t written = write(STDERR_FILENO, bytes, size);
    if (written <= 0) return;
    bytes += written;
    size -= static_cast<std::size_t>(written);
  }
}

void on_fault(int number, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (const ForbiddenEntry& entry : forbidden_table) {
    if (address >= entry.first.load(std::memory_order_acquire) &&
        address < entry.end.load(std::memory_order_acquire)) {
      write_all(entry.message.data(), strnlen(entry.message.data(), entry.message.size()));
      break;
    }
  }
  sigaction(number, &previous_action,
            nullptr);  // the faulting access runs again and meets what was there before us
}

void install_fault_handler() {
  static const bool installed = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &previous_action) == 0;
  }();
  (void)installed;
}

int enter_forbidden(std::byte* data, std::size_t bytes, const std::string& message) {
  const std::lock_guard lock(forbidden_mutex);
  install_fault_handler();
  for (int i = 0; i < kTableSize; ++i) {
    ForbiddenEntry& entry = forbidden_table[static_cast<std::size_t>(i)];
    if (entry.first.load(std::memory_order_relaxed) != 0) continue;
    const std::string line = "fsdpp: " + message.substr(0, entry.message.size() - 10) + "\n";
    std::memcpy(entry.message.data(), line.c_str(), line.size() + 1);
    entry.end.store(reinterpret_cast<uintptr_t>(data) + bytes, std::memory_order_release);
    entry.first.store(reinterpret_cast<uintptr_t>(data), std::memory_order_release);
    return i;
  }
  return -1;
}

}  // namespace

Memory::Memory(std::byte* data, std::size_t bytes, Free free, std::string purpose,
               std::shared_ptr<Ledger> ledger)
    : data_(data), bytes_(bytes), free_(free), purpose_(std::move(purpose)), ledger_(std::move(ledger)) {
  if (ledger_) ledger_->add(purpose_, static_cast<int64_t>(bytes_));
}

Memory::~Memory() { free(); }

Memory::Memory(Memory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      free_(other.free_),
      purpose_(std::move(other.purpose_)),
      ledger_(std::move(other.ledger_)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  if (this == &other) return *this;
  free();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  free_ = other.free_;
  purpose_ = std::move(other.purpose_);
  ledger_ = std::move(other.ledger_);
  return *this;
}

void Memory::free() noexcept {
  if (data_ == nullptr) return;
  free_(data_, bytes_);
  if (ledger_) ledger_->remove(purpose_, static_cast<int64_t>(bytes_));
  data_ = nullptr;
}

Memory host_memory(std::size_t bytes, std::string purpose, std::shared_ptr<Ledger> ledger) {
  if (bytes == 0) return {};
  auto* data = static_cast<std::byte*>(map_pages(bytes, PROT_READ | PROT_WRITE, 0, purpose));
  const auto give_back = [](std::byte* begin, std::size_t size) noexcept {
    unpoison(begin, size);
    munmap(begin, size);
  };
  return {data, bytes, give_back, std::move(purpose), std::move(ledger)};
}

ForbiddenRange::ForbiddenRange(std::size_t bytes, const std::string& message) : bytes_(bytes) {
  if (bytes_ == 0) return;
  data_ = static_cast<std::byte*>(map_pages(bytes_, PROT_NONE, MAP_NORESERVE, "address space"));
  slot_ = enter_forbidden(data_, bytes_, message);
}

ForbiddenRange::~ForbiddenRange() { free(); }

ForbiddenRange::ForbiddenRange(ForbiddenRange&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      slot_(std::exchange(other.slot_, -1)) {}

ForbiddenRange& ForbiddenRange::operator=(ForbiddenRange&& other) noexcept {
  if (this == &other) return *this;
  free();
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  slot_ = std::exchange(other.slot_, -1);
  return *this;
}

void ForbiddenRange::free() noexcept {
  if (data_ == nullptr) return;
  if (slot_ >= 0) {
    const std::lock_guard lock(forbidden_mutex);
    forbidden_table[static_cast<std::size_t>(slot_)].end.store(0, std::memory_order_release);
    forbidden_table[static_cast<std::size_t>(slot_)].first.store(0, std::memory_order_release);
  }
  munmap(data_, bytes_);
  data_ = nullptr;
}

}  // namespace fsdpp::device
