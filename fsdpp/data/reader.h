#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "fsdpp/data/descriptor.h"

namespace fsdpp::data {

/// A file that text is read from, as it was when it was listed.
struct Source {
  std::filesystem::path path;
  int64_t size = 0;         // bytes on disk
  int64_t modified_ns = 0;  // since 1970

  bool operator==(const Source&) const = default;
};

/// The files behind `text`: the file itself, or the regular files in a directory and below it, in byte order
/// of their paths. In directories, names that start with a dot and token files (*.tokens) are passed over,
/// and links to directories are not followed. Throws UsageError, naming path and remedy, when there is
/// nothing to read or something cannot be looked into.
[[nodiscard]] std::vector<Source> list_sources(const std::filesystem::path& text);

/// True when the start of a file says that it holds no text: a zero byte among its first 8 KiB.
[[nodiscard]] bool looks_binary(std::span<const char> start) noexcept;

/// Streams one file's bytes. gzip is recognised by its content and unpacked, with any number of members (so
/// also dictzip, which is gzip with an index in its header).
class Reader {
 public:
  /// Throws UsageError, naming path and remedy: cannot be opened, is called .gz or .dz and is no gzip, or is
  /// packed in another way (xz, zstd, bzip2, zip).
  explicit Reader(std::filesystem::path path);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// Fills `out` from the file; fewer bytes than out.size() only at the end, 0 after it.
  /// Throws UsageError for truncated or damaged gzip, EnvironmentError when the disk fails.
  [[nodiscard]] size_t read(std::span<char> out);

 private:
  struct Gzip;

  /// Next bytes of the file into input_; false at its end.
  bool refill();
  void recognise();
  [[nodiscard]] size_t read_plain(std::span<char> out);
  [[nodiscard]] size_t read_gzip(std::span<char> out);
  bool start_member();
  [[noreturn]] void fail(const char* what) const;

  std::filesystem::path path_;
  std::vector<char> buffer_;
  Descriptor file_;
  std::span<const char> input_;  // unread part of buffer_, of plain files
  std::unique_ptr<Gzip> gzip_;   // null for plain files
};

}  // namespace fsdpp::data
