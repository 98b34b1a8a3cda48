#pragma once

#include <stdlib.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fsdpp::data {

/// A folder of the test's own, deleted with all it holds at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "fsdpp-data-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp " + name);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

  /// Writes a file (and the folders above it) and returns its path.
  std::filesystem::path write(const std::string& name, std::string_view bytes) const {
    const auto file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return file;
  }

 private:
  std::filesystem::path path_;
};

inline std::string file_bytes(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// One gzip member. With `chunk` > 0 as dictzip writes it: an extra header field 'RA' and a full flush per
/// chunk.
inline std::string gzip(std::string_view bytes, size_t chunk = 0) {
  z_stream stream = {};
  if (deflateInit2(&stream, 6, Z_DEFLATED, MAX_WBITS + 16, 8, Z_DEFAULT_STRATEGY) != Z_OK) {
    throw std::runtime_error("deflateInit2");
  }
  std::string extra = {'R', 'A', 4, 0, 1, 0, static_cast<char>(chunk & 255), static_cast<char>(chunk >> 8)};
  gz_header header = {};
  header.extra = reinterpret_cast<Bytef*>(extra.data());
  header.extra_len = static_cast<uInt>(extra.size());
  if (chunk > 0) deflateSetHeader(&stream, &header);
  std::string input(bytes);
  std::string out(input.size() + input.size() / 8 + 4096, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  for (size_t left = input.size(); chunk > 0 && left > chunk; left -= chunk) {
    stream.avail_in = static_cast<uInt>(chunk);
    deflate(&stream, Z_FULL_FLUSH);
  }
  stream.avail_in = static_cast<uInt>(input.data() + input.size() - reinterpret_cast<char*>(stream.next_in));
  if (deflate(&stream, Z_FINISH) != Z_STREAM_END) throw std::runtime_error("deflate");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

/// Text of `count` bytes that compresses a little; any byte but zero occurs, so it is no UTF-8.
inline std::string some_text(size_t count, uint32_t seed = 1) {
  std::string bytes(count, ' ');
  for (char& byte : bytes) {
    seed = seed * 1664525 + 1013904223;  // Numerical Recipes' generator
    const uint32_t draw = seed >> 16;
    byte = static_cast<char>(draw % 3 == 0 ? 'e' : 1 + draw % 255);
  }
  return bytes;
}

/// The message of the `Error` that `call` throws; "" when it throws none.
template <class Error, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

}  // namespace fsdpp::data
