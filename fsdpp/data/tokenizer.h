#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdpp::data {

/// A token id as it lies in token files.
using Token = uint16_t;

/// Tokens are bytes: ids 0..255 are the bytes themselves, kBoundary stands before each document.
/// Needs no vocabulary file and takes any text, UTF-8 or not.
class ByteTokenizer {
 public:
  static constexpr Token kBoundary = 256;
  static constexpr int64_t kVocabulary = 257;
  /// Names the mapping from text to ids: token files made with another one are rebuilt.
  static constexpr std::string_view kName = "byte-257";

  /// One token per byte; no boundary.
  [[nodiscard]] static std::vector<Token> encode(std::string_view bytes);
  /// Appends encode(bytes) to `tokens`.
  static void append(std::string_view bytes, std::vector<Token>& tokens);

  /// The bytes of `tokens`; boundaries stand for no byte and are left out. The result may be no UTF-8: see
  /// escape_bytes. Throws UsageError, naming id and position, for an id outside the vocabulary.
  [[nodiscard]] static std::string decode(std::span<const Token> tokens);
  [[nodiscard]] static std::string decode(std::span<const int64_t> tokens);
};

/// What escape_bytes does with line feeds and tabs.
enum class LineBreaks { keep, escape };

/// Any bytes as printable UTF-8, fit for terminals and JSON strings (after a JSON writer's own escapes).
///
/// Becomes \xNN, byte by byte: what is no valid UTF-8, control characters (C0 but kept line breaks, DEL, C1),
/// and invisible ones that reorder or break lines (U+200B..200F, 2028..202E, 2060..206F, FEFF). So does a
/// backslash that would read as such an escape: putting back every \xNN gives the same bytes again.
[[nodiscard]] std::string escape_bytes(std::string_view bytes, LineBreaks line_breaks = LineBreaks::keep);

}  // namespace fsdpp::data
