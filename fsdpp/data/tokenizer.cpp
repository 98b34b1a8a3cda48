#include "fsdpp/data/tokenizer.h"

#include <cctype>

#include "fsdpp/base/error.h"

namespace fsdpp::data {
namespace {

template <class Id>
std::string decode_ids(std::span<const Id> tokens) {
  std::string bytes;
  bytes.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto id = static_cast<int64_t>(tokens[i]);
    require(id >= 0 && id < ByteTokenizer::kVocabulary, "token id ", id, " at position ", i,
            " is outside the byte vocabulary 0..", ByteTokenizer::kVocabulary - 1,
            "; decode only ids of a model with vocabulary ", ByteTokenizer::kVocabulary);
    if (id != ByteTokenizer::kBoundary) bytes.push_back(static_cast<char>(id));
  }
  return bytes;
}

struct Character {
  uint32_t code = 0;
  size_t size = 0;  // bytes; 0: no valid UTF-8 here
};

/// The character that `bytes` (not empty) starts with: shortest form, no surrogates, at most U+10FFFF (RFC
/// 3629).
Character first_character(std::string_view bytes) {
  const auto lead = static_cast<uint8_t>(bytes[0]);
  if (lead < 0x80) return {lead, 1};
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || bytes.size() < size) return {};
  uint32_t code = lead & (0x7fU >> size);
  for (size_t i = 1; i < size; ++i) {
    const auto next = static_cast<uint8_t>(bytes[i]);
    if ((next & 0xc0) != 0x80) return {};
    code = code << 6 | (next & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kSmallest[size] || surrogate || code > 0x10ffff) return {};
  return {code, size};
}

bool printable(uint32_t code) {
  const auto within = [code](uint32_t first, uint32_t last) { return first <= code && code <= last; };
  return !(code < 0x20 || within(0x7f, 0x9f) || within(0x200b, 0x200f) || within(0x2028, 0x202e) ||
           within(0x2060, 0x206f) || code == 0xfeff);
}

/// True when `bytes` starts with \xNN.
bool reads_as_escape(std::string_view bytes) {
  const auto digit = [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; };
  return bytes.size() >= 4 && bytes.starts_with("\\x") && digit(bytes[2]) && digit(bytes[3]);
}

void append_escaped(std::string_view bytes, std::string& out) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (const char c : bytes) {
    const auto byte = static_cast<uint8_t>(c);
    out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
  }
}

}  // namespace

std::vector<Token> ByteTokenizer::encode(std::string_view bytes) {
  std::vector<Token> tokens;
  append(bytes, tokens);
  return tokens;
}

void ByteTokenizer::append(std::string_view bytes, std::vector<Token>& tokens) {
  const size_t start = tokens.size();
  tokens.resize(start + bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) tokens[start + i] = static_cast<uint8_t>(bytes[i]);
}

std::string ByteTokenizer::decode(std::span<const Token> tokens) { return decode_ids(tokens); }

std::string ByteTokenizer::decode(std::span<const int64_t> tokens) { return decode_ids(tokens); }

std::string escape_bytes(std::string_view bytes, LineBreaks line_breaks) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Character character = first_character(bytes);
    const size_t size = character.size == 0 ? 1 : character.size;
    const std::string_view here = bytes.substr(0, size);
    const bool line_break = here == "\n" || here == "\t";
    if (reads_as_escape(bytes)) {
      append_escaped(here, out);
    } else if (line_break ? line_breaks == LineBreaks::keep
                          : character.size > 0 && printable(character.code)) {
      out += here;
    } else {
      append_escaped(here, out);
    }
    bytes.remove_prefix(size);
  }
  return out;
}

}  // namespace fsdpp::data
