#include "fsdpp/data/reader.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <string_view>
#include <system_error>

#include "fsdpp/base/error.h"

namespace fsdpp::data {
namespace fs = std::filesystem;
namespace {

constexpr size_t kBufferBytes = size_t{1} << 18;

std::string quoted(const fs::path& path) { return "'" + path.string() + "'"; }

Source describe(const fs::path& path) {
  struct stat status = {};
  require(::stat(path.c_str(), &status) == 0, "text file ", quoted(path), " cannot be read: ", errno_text(),
          "; check the path and its permissions");
  return {path, status.st_size,
          static_cast<int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec};
}

std::vector<Source> list_directory(const fs::path& folder) {
  std::vector<Source> sources;
  try {
    for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::recursive_directory_iterator();
         ++entry) {
      const bool hidden = entry->path().filename().native().starts_with('.');
      if (hidden) entry.disable_recursion_pending();
      if (hidden || entry->path().extension() == ".tokens" || !entry->is_regular_file()) continue;
      sources.push_back(describe(entry->path()));
    }
  } catch (const fs::filesystem_error& error) {
    throw UsageError(text("text directory ", quoted(error.path1().empty() ? folder : error.path1()),
                          " cannot be read: ", error.code().message(), "; check its permissions"));
  }
  require(!sources.empty(), "text directory ", quoted(folder),
          " holds no regular file; give a directory with text files (.gz and .dz are unpacked)");
  std::sort(sources.begin(), sources.end(),
            [](const Source& a, const Source& b) { return a.path.native() < b.path.native(); });
  return sources;
}

bool starts_with(std::span<const char> bytes, std::string_view magic) {
  return std::string_view(bytes.data(), bytes.size()).starts_with(magic);
}

}  // namespace

std::vector<Source> list_sources(const fs::path& path) {
  require(!path.empty(), "the text path is empty; give a text file, a .gz or .dz file, or a directory");
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  require(status.type() != fs::file_type::not_found, "text ", quoted(path),
          " does not exist; give a text file, a .gz or .dz file, or a directory");
  require(status.type() != fs::file_type::none, "text ", quoted(path), " cannot be read: ", error.message(),
          "; check the path and its permissions");
  if (fs::is_directory(status)) return list_directory(path);
  require(fs::is_regular_file(status), "text ", quoted(path),
          " is neither a regular file nor a directory; write it to a file first");
  return {describe(path)};
}

bool looks_binary(std::span<const char> start) noexcept {
  constexpr size_t kProbeBytes = 8192;  // where grep and git look too
  const auto probe = start.first(std::min(start.size(), kProbeBytes));
  return std::find(probe.begin(), probe.end(), '\0') != probe.end();
}

struct Reader::Gzip {
  z_stream stream = {};
  bool in_member = true;

  Gzip() {
    constexpr int kGzipFormat = 16;  // zlib.h: windowBits + 16 takes gzip alone
    if (inflateInit2(&stream, MAX_WBITS + kGzipFormat) != Z_OK) {
      throw EnvironmentError("no memory for a gzip window of 32 KiB; free some memory");
    }
  }
  ~Gzip() { inflateEnd(&stream); }
  Gzip(const Gzip&) = delete;
  Gzip& operator=(const Gzip&) = delete;
};

Reader::Reader(fs::path path) : path_(std::move(path)), buffer_(kBufferBytes), file_(path_, O_RDONLY) {
  require(file_.open(), "text file ", quoted(path_), " cannot be opened: ", errno_text(),
          "; check the path and its permissions");
  refill();
  recognise();
}

Reader::~Reader() = default;

void Reader::recognise() {
  using namespace std::string_view_literals;
  for (const auto& [magic, tool] : {std::pair{"\xfd"
                                              "7zXZ\0"sv,
                                              "xz"},
                                    {"\x28\xb5\x2f\xfd"sv, "zstd"},
                                    {"BZh"sv, "bzip2"},
                                    {"PK\x03\x04"sv, "zip"}}) {
    // BZh is also text; a bzip2 block or end mark follows its level digit.
    if (!starts_with(input_, magic) || (magic == "BZh"sv && !looks_binary(input_))) continue;
    throw UsageError(text("text file ", quoted(path_), " is packed with ", tool,
                          ", which is not read; unpack it or pack it with gzip"));
  }
  const bool is_gzip = starts_with(input_, "\x1f\x8b"sv);
  const bool called_gzip = path_.extension() == ".gz" || path_.extension() == ".dz";
  if (called_gzip && input_.size() < 2) fail("is truncated");
  require(is_gzip || !called_gzip, "text file ", quoted(path_), " is called ", path_.extension().string(),
          " and holds no gzip data; fetch it again, or take the ending off its name if it is plain text");
  if (!is_gzip) return;
  gzip_ = std::make_unique<Gzip>();
  gzip_->stream.next_in = reinterpret_cast<Bytef*>(buffer_.data());
  gzip_->stream.avail_in = static_cast<uInt>(input_.size());
}

bool Reader::refill() {
  const std::ptrdiff_t count = file_.read(buffer_);
  if (count < 0) {
    throw EnvironmentError(
        text("text file ", quoted(path_), " cannot be read: ", errno_text(), "; check the disk it lies on"));
  }
  input_ = std::span<const char>(buffer_).first(static_cast<size_t>(count));
  return count > 0;
}

size_t Reader::read(std::span<char> out) { return gzip_ ? read_gzip(out) : read_plain(out); }

size_t Reader::read_plain(std::span<char> out) {
  size_t done = 0;
  while (done < out.size() && (!input_.empty() || refill())) {
    const size_t count = std::min(out.size() - done, input_.size());
    std::copy_n(input_.begin(), count, out.begin() + static_cast<std::ptrdiff_t>(done));
    input_ = input_.subspan(count);
    done += count;
  }
  return done;
}

size_t Reader::read_gzip(std::span<char> out) {
  constexpr size_t kLargest = size_t{1} << 30;  // avail_out is 32 bits wide
  out = out.first(std::min(out.size(), kLargest));
  z_stream& stream = gzip_->stream;
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  while (stream.avail_out > 0 && (gzip_->in_member || start_member())) {
    // Without input, inflate may still hold output back; it says Z_BUF_ERROR when it does not.
    if (stream.avail_in == 0 && refill()) {
      stream.next_in = reinterpret_cast<Bytef*>(buffer_.data());
      stream.avail_in = static_cast<uInt>(input_.size());
    }
    const int result = inflate(&stream, Z_NO_FLUSH);
    if (result == Z_STREAM_END) gzip_->in_member = false;
    if (result == Z_BUF_ERROR && stream.avail_in == 0) fail("is truncated: its gzip data end in the middle");
    if (result != Z_OK && result != Z_STREAM_END) fail(stream.msg == nullptr ? "is damaged" : stream.msg);
  }
  return out.size() - stream.avail_out;
}

/// Goes on to the next member; false when none follows. Zero bytes between and after members are padding, as
/// for gzip.
bool Reader::start_member() {
  z_stream& stream = gzip_->stream;
  while (true) {
    if (stream.avail_in == 0) {
      if (!refill()) return false;
      stream.next_in = reinterpret_cast<Bytef*>(buffer_.data());
      stream.avail_in = static_cast<uInt>(input_.size());
    }
    if (*stream.next_in != 0) break;
    ++stream.next_in;
    --stream.avail_in;
  }
  inflateReset(&stream);
  return gzip_->in_member = true;
}

void Reader::fail(const char* what) const {
  const std::string_view reason = what;
  throw UsageError(text("gzip file ", quoted(path_), " ",
                        reason.starts_with("is ") ? "" : "is damaged: ", reason, "; fetch or pack it again"));
}

}  // namespace fsdpp::data
