#include "fsdpp/data/token_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>
#include <system_error>
#include <utility>

#include "fsdpp/base/bytes.h"
#include "fsdpp/base/error.h"

namespace fsdpp::data {
namespace fs = std::filesystem;
namespace {

constexpr std::array<char, 8> kMagic = {'F', 'S', 'D', 'P', 'T', 'O', 'K', '\n'};
constexpr uint32_t kVersion = 1;
constexpr size_t kPendingTokens = size_t{1} << 19;  // 1 MiB per write; content_hash is taken over such blocks
constexpr const char* kTemporaryEnd = ".tmp";

/// The first bytes of a token file.
struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t version = kVersion;
  uint32_t vocabulary = 0;
  uint64_t fingerprint = 0;
  uint64_t content_hash = 0;
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t text_bytes = 0;
  uint64_t check = 0;  // of all the above

  [[nodiscard]] uint64_t checksum() const {
    Hash hash;
    hash.add(std::string_view(reinterpret_cast<const char*>(this), offsetof(Header, check)));
    return hash.value();
  }
};
static_assert(sizeof(Header) == 64, "the tokens behind it start on a cache line");

/// Start of the names of `path`'s temporary files; hidden, so that a text directory may hold its own token
/// file.
std::string temporary_prefix(const fs::path& path) { return "." + path.filename().string() + "."; }

std::string unique_suffix() {
  std::random_device device;  // process ids are not unique on shared file systems
  return std::to_string(::getpid()) + "-" + std::to_string(device()) + kTemporaryEnd;
}

template <class T>
std::span<const char> bytes_of(std::span<const T> items) {
  return {reinterpret_cast<const char*>(items.data()), items.size_bytes()};
}

std::string defect(const Header& header, int64_t file_bytes) {
  if (header.magic != kMagic) return "it is no token file";
  if (header.version != kVersion) return text("version ", header.version, ", expected ", kVersion);
  if (header.check != header.checksum()) return "its header is damaged";
  const int64_t expected = static_cast<int64_t>(sizeof(Header) + sizeof(Token) * header.tokens);
  if (file_bytes != expected) return text("it has ", file_bytes, " bytes, expected ", expected);
  return {};
}

}  // namespace

TokenFile::TokenFile(const fs::path& path) {
  const auto check = [&](bool good, const std::string& why) {
    if (good) return;
    throw EnvironmentError(text("token file '", path.string(), "' cannot be used: ", why,
                                "; delete it and prepare the text again"));
  };
  const Descriptor file(path, O_RDONLY);
  check(file.open(), errno_text());
  Header header;
  const std::ptrdiff_t count = file.read({reinterpret_cast<char*>(&header), sizeof header});
  check(count >= 0, errno_text());
  check(count == sizeof header, text("it has ", count, " bytes, less than a header"));
  struct stat status = {};
  check(::fstat(file.number(), &status) == 0, errno_text());
  const std::string why = defect(header, status.st_size);
  check(why.empty(), why);

  map_bytes_ = static_cast<size_t>(status.st_size);
  void* map = ::mmap(nullptr, map_bytes_, PROT_READ, MAP_SHARED, file.number(), 0);
  check(map != MAP_FAILED, errno_text());
  map_ = map;
  info_ = {header.fingerprint, header.content_hash, header.tokens,
           header.documents,   header.text_bytes,   header.vocabulary};
}

TokenFile::~TokenFile() {
  if (map_ != nullptr) ::munmap(map_, map_bytes_);
}

TokenFile::TokenFile(TokenFile&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)),
      map_bytes_(std::exchange(other.map_bytes_, 0)),
      info_(std::exchange(other.info_, {})) {}

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  std::swap(map_, other.map_);
  std::swap(map_bytes_, other.map_bytes_);
  std::swap(info_, other.info_);
  return *this;
}

std::span<const Token> TokenFile::tokens() const noexcept {
  if (map_ == nullptr) return {};
  const char* first = static_cast<const char*>(map_) + sizeof(Header);
  return {reinterpret_cast<const Token*>(first), static_cast<size_t>(info_.tokens)};
}

TokenFileWriter::TokenFileWriter(fs::path path)
    : path_(std::move(path)),
      temporary_(path_.parent_path() / (temporary_prefix(path_) + unique_suffix())),
      file_(temporary_, O_WRONLY | O_CREAT | O_EXCL) {
  if (!file_.open()) {
    temporary_.clear();
    fail("created");
  }
  pending_.reserve(kPendingTokens);
  const std::array<char, sizeof(Header)> room{};  // no magic: the header comes last
  write(room);
}

TokenFileWriter::~TokenFileWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void TokenFileWriter::append(std::span<const Token> tokens) {
  tokens_ += static_cast<int64_t>(tokens.size());
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), kPendingTokens - pending_.size());
    pending_.insert(pending_.end(), tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count));
    tokens = tokens.subspan(count);
    if (pending_.size() == kPendingTokens) flush();
  }
}

void TokenFileWriter::flush() {
  const auto bytes = bytes_of(std::span<const Token>(pending_));
  hash_.add(std::string_view(bytes.data(), bytes.size()));
  write(bytes);
  pending_.clear();
}

void TokenFileWriter::finish(TokenFileInfo info) {
  flush();
  Header header;
  header.vocabulary = static_cast<uint32_t>(info.vocabulary);
  header.fingerprint = info.fingerprint;
  header.content_hash = hash_.value();
  header.tokens = tokens_;
  header.documents = info.documents;
  header.text_bytes = info.text_bytes;
  header.check = header.checksum();
  if (::lseek(file_.number(), 0, SEEK_SET) != 0) fail("written");
  write(bytes_of(std::span<const Header>(&header, 1)));
  if (::fsync(file_.number()) != 0) fail("written");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("renamed into place");
  temporary_.clear();
  // Makes the rename last over a power cut; not every file system can, and the file is whole either way.
  const Descriptor folder(path_.parent_path(), O_RDONLY | O_DIRECTORY);
  if (folder.open()) (void)::fsync(folder.number());
}

void TokenFileWriter::remove_leftovers(const fs::path& path) {
  const std::string prefix = temporary_prefix(path);
  std::error_code ignored;  // what cannot be deleted does no harm
  for (const auto& entry : fs::directory_iterator(path.parent_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(kTemporaryEnd)) fs::remove(entry.path(), ignored);
  }
}

void TokenFileWriter::write(std::span<const char> bytes) {
  if (!file_.write(bytes)) fail("written");
}

void TokenFileWriter::fail(const char* action) const {
  const std::string reason = errno_text();
  throw EnvironmentError(
      text("token file '", path_.string(), "' cannot be ", action, ": ", reason, " (after ",
           human_bytes(tokens_ * static_cast<int64_t>(sizeof(Token))),
           "); give a writable cache folder on a disk with room for two bytes per byte of text"));
}

}  // namespace fsdpp::data
