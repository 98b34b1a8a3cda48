#include "fsdpp/data/descriptor.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace fsdpp::data {

Descriptor::Descriptor(const std::filesystem::path& path, int flags) noexcept {
  do {
    number_ = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (number_ < 0 && errno == EINTR);
}

Descriptor::~Descriptor() {
  if (open()) ::close(number_);
}

std::ptrdiff_t Descriptor::read(std::span<char> out) const noexcept {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t count = ::read(number_, out.data() + done, out.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -1;
    if (count == 0) break;
    done += static_cast<size_t>(count);
  }
  return static_cast<std::ptrdiff_t>(done);
}

bool Descriptor::write(std::span<const char> bytes) const noexcept {
  while (!bytes.empty()) {
    const ssize_t count = ::write(number_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
  return true;
}

std::string errno_text() { return std::generic_category().message(errno); }

}  // namespace fsdpp::data
