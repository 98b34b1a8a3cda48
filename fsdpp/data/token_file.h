#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "fsdpp/data/descriptor.h"
#include "fsdpp/data/hash.h"
#include "fsdpp/data/tokenizer.h"

namespace fsdpp::data {

/// What a token file says about itself.
struct TokenFileInfo {
  uint64_t fingerprint = 0;   // of the sources and the tokenizer
  uint64_t content_hash = 0;  // of the tokens
  int64_t tokens = 0;
  int64_t documents = 0;
  int64_t text_bytes = 0;  // unpacked
  int64_t vocabulary = 0;
};

/// A token file, memory-mapped for reading: a header of 64 bytes, then the tokens, 16 bits each, native byte
/// order. Stays readable when the file is replaced or deleted meanwhile. Move-only.
class TokenFile {
 public:
  /// Throws EnvironmentError, naming path and remedy, for a file that is missing, of another format or
  /// version, or whose length is not what its header says.
  explicit TokenFile(const std::filesystem::path& path);
  ~TokenFile();
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;

  [[nodiscard]] const TokenFileInfo& info() const noexcept { return info_; }
  [[nodiscard]] std::span<const Token> tokens() const noexcept;

 private:
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  TokenFileInfo info_;
};

/// Writes a token file under a temporary name in the same folder and renames it when it is whole: readers see
/// the old file or the new one, never a part, also after a crash.
///
/// Its functions throw EnvironmentError, naming path and remedy, when the folder cannot be written or the
/// disk is full.
class TokenFileWriter {
 public:
  explicit TokenFileWriter(std::filesystem::path path);
  /// Deletes the temporary file unless finish() returned.
  ~TokenFileWriter();
  TokenFileWriter(const TokenFileWriter&) = delete;
  TokenFileWriter& operator=(const TokenFileWriter&) = delete;

  void append(std::span<const Token> tokens);
  [[nodiscard]] int64_t tokens() const noexcept { return tokens_; }

  /// Brings everything to disk and renames. `info`'s tokens and content_hash are filled in here.
  void finish(TokenFileInfo info);

  /// Deletes what crashed writers of `path` left. Only for who knows that no other one is at work.
  static void remove_leftovers(const std::filesystem::path& path);

 private:
  void flush();
  void write(std::span<const char> bytes);
  [[noreturn]] void fail(const char* action) const;

  std::filesystem::path path_;
  std::filesystem::path temporary_;
  Descriptor file_;
  std::vector<Token> pending_;
  Hash hash_;
  int64_t tokens_ = 0;
};

}  // namespace fsdpp::data
