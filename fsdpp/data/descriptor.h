#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace fsdpp::data {

/// An open file; closed at the end of its life. Move-only.
class Descriptor {
 public:
  Descriptor() = default;
  /// Opens with O_CLOEXEC; new files get mode 0666 less the umask. Not open on failure: see errno.
  Descriptor(const std::filesystem::path& path, int flags) noexcept;
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }

  [[nodiscard]] bool open() const noexcept { return number_ >= 0; }
  [[nodiscard]] int number() const noexcept { return number_; }

  /// Reads up to out.size() bytes; fewer only at the end of the file. Returns -1 on failure: see errno.
  [[nodiscard]] std::ptrdiff_t read(std::span<char> out) const noexcept;
  /// Writes all bytes at the file's position. False on failure: see errno.
  [[nodiscard]] bool write(std::span<const char> bytes) const noexcept;

 private:
  int number_ = -1;
};

/// Text of errno, for messages: "No such file or directory".
[[nodiscard]] std::string errno_text();

}  // namespace fsdpp::data
