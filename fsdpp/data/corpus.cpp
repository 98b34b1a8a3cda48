#include "fsdpp/data/corpus.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/data/reader.h"

namespace fsdpp::data {
namespace fs = std::filesystem;
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;

std::string whole_path(const fs::path& path) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);
  return error ? fs::absolute(path).string() : whole.string();
}

uint64_t fingerprint_of(const std::vector<Source>& sources) {
  Hash hash;
  hash.add(ByteTokenizer::kName);
  for (const Source& source : sources) {
    hash.add(whole_path(source.path));
    hash.add(static_cast<uint64_t>(source.size));
    hash.add(static_cast<uint64_t>(source.modified_ns));
  }
  return hash.value();
}

/// The token file at `path` if it is whole and was made from what `fingerprint` stands for.
std::optional<TokenFile> open_current(const fs::path& path, uint64_t fingerprint) {
  try {
    TokenFile file(path);
    if (file.info().fingerprint == fingerprint) return file;
  } catch (const EnvironmentError&) {
    // Missing, damaged or of another version: made again.
  }
  return std::nullopt;
}

/// Holds the lock of one token file among threads and processes, until the end of its life.
class BuildLock {
 public:
  explicit BuildLock(const fs::path& token_path)
      : file_(token_path.parent_path() / ("." + token_path.filename().string() + ".lock"), O_RDWR | O_CREAT) {
    if (!file_.open()) {
      throw EnvironmentError(text("cache folder '", token_path.parent_path().string(),
                                  "' cannot be written: ", errno_text(), "; give a writable cache folder"));
    }
    // Polls, so that Ctrl-C ends the wait whichever thread the signal meets.
    while (::flock(file_.number(), LOCK_EX | LOCK_NB) != 0) {
      if (interrupted()) throw Interrupted("interrupted while another process prepares the text");
      if (errno != EWOULDBLOCK && errno != EINTR)
        return;  // no locks here: several build, the last rename stays
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    held_ = true;
  }
  [[nodiscard]] bool held() const noexcept { return held_; }

 private:
  Descriptor file_;
  bool held_ = false;
};

/// Appends one document: nothing when it is empty, or looks binary and `skip_binary` says so.
void append_document(const Source& source, bool skip_binary, TokenFileWriter& writer, TokenFileInfo& info) {
  Reader reader(source.path);
  std::vector<char> block(kBlockBytes);
  std::vector<Token> tokens;
  for (bool first = true; const size_t count = reader.read(block); first = false) {
    if (first && skip_binary && looks_binary({block.data(), count})) return;
    tokens.clear();
    if (first) tokens.push_back(ByteTokenizer::kBoundary);
    ByteTokenizer::append({block.data(), count}, tokens);
    writer.append(tokens);
    info.documents += first ? 1 : 0;
    info.text_bytes += static_cast<int64_t>(count);
    if (interrupted()) throw Interrupted("interrupted while preparing the text");
  }
}

void build(const fs::path& path, const std::vector<Source>& sources, const fs::path& token_path) {
  const bool directory = fs::is_directory(path);
  TokenFileWriter writer(token_path);
  TokenFileInfo info;
  info.fingerprint = fingerprint_of(sources);
  info.vocabulary = ByteTokenizer::kVocabulary;
  for (const Source& source : sources) append_document(source, directory, writer, info);
  require(info.text_bytes > 0, "text '", path.string(), "' ", directory ? "holds no text" : "is empty",
          "; give a file or directory with text in it");
  if (list_sources(path) != sources) {
    throw EnvironmentError(
        text("text '", path.string(), "' changed while it was read; start again when it is whole"),
        /*retryable=*/true);
  }
  writer.finish(info);
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) {
    throw EnvironmentError(text("cache folder '", folder.string(), "' cannot be made: ", error.message(),
                                "; give a writable cache folder"));
  }
}

}  // namespace

Corpus Corpus::prepare(const fs::path& path, const fs::path& cache_folder) {
  require(!cache_folder.empty(), "the cache folder's path is empty; give a writable folder");
  std::vector<Source> sources = list_sources(path);
  const fs::path tokens = token_path(path, cache_folder);
  if (auto file = open_current(tokens, fingerprint_of(sources))) return {std::move(*file), false};

  make_folder(cache_folder);
  const BuildLock lock(tokens);
  sources = list_sources(path);  // the wait may have been long
  if (auto file = open_current(tokens, fingerprint_of(sources))) return {std::move(*file), false};
  if (lock.held()) TokenFileWriter::remove_leftovers(tokens);
  build(path, sources, tokens);
  return {TokenFile(tokens), true};
}

fs::path Corpus::token_path(const fs::path& path, const fs::path& cache_folder) {
  constexpr size_t kNameBytes = 100;  // names have at most 255
  fs::path whole = whole_path(path);
  if (!whole.has_filename()) whole = whole.parent_path();
  Hash hash;
  hash.add(whole.string());
  char digits[20];
  std::snprintf(digits, sizeof digits, "-%016llx", static_cast<unsigned long long>(hash.value()));
  return cache_folder / (whole.filename().string().substr(0, kNameBytes) + digits + ".tokens");
}

Split Corpus::split(double validation_fraction) const {
  require(validation_fraction >= 0 && validation_fraction < 1, "validation fraction ", validation_fraction,
          ": give at least 0 and less than 1");
  const std::span<const Token> all = tokens();
  const auto count = static_cast<size_t>(std::llround(static_cast<double>(all.size()) * validation_fraction));
  return {all.first(all.size() - count), all.last(count)};
}

}  // namespace fsdpp::data
