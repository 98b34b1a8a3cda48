#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "fsdpp/data/token_file.h"

namespace fsdpp::data {

/// A corpus cut in two; neither part sees a token of the other.
struct Split {
  std::span<const Token> train;       // from the start
  std::span<const Token> validation;  // to the end
};

/// A text as tokens in a memory-mapped file. Each source file is one document, with ByteTokenizer::kBoundary
/// before it. Move-only; spans stay valid while the corpus lives.
class Corpus {
 public:
  /// Opens the token file of `text` (a file, a .gz or .dz, or a directory: see list_sources; binary and empty
  /// files in directories are left out) in `cache_folder`, which is made if missing. Builds the file first
  /// where there is none, it is damaged, or path, size or modification time of a source, or the tokenizer,
  /// changed since.
  ///
  /// Any number of threads and processes may prepare one text at once: one builds, the others wait for it.
  /// Throws UsageError for a text that is missing, empty, truncated or unreadable; EnvironmentError for a
  /// cache folder that cannot be written and (retryable) for a text that changes while it is read;
  /// Interrupted on Ctrl-C.
  [[nodiscard]] static Corpus prepare(const std::filesystem::path& text,
                                      const std::filesystem::path& cache_folder);

  /// Where prepare() keeps the tokens of `text`: a name made from the text's absolute path.
  [[nodiscard]] static std::filesystem::path token_path(const std::filesystem::path& text,
                                                        const std::filesystem::path& cache_folder);

  [[nodiscard]] std::span<const Token> tokens() const noexcept { return file_.tokens(); }
  /// Number of tokens, documents and text bytes, and two hashes: ranks that see one content_hash see the same
  /// tokens.
  [[nodiscard]] const TokenFileInfo& info() const noexcept { return file_.info(); }
  /// True when this call built the token file, false when it found it.
  [[nodiscard]] bool built() const noexcept { return built_; }

  /// The last `validation_fraction` of the tokens, rounded to whole tokens, is for validation.
  /// Throws UsageError unless 0 <= validation_fraction < 1.
  [[nodiscard]] Split split(double validation_fraction) const;

 private:
  Corpus(TokenFile file, bool built) : file_(std::move(file)), built_(built) {}

  TokenFile file_;
  bool built_;
};

}  // namespace fsdpp::data
