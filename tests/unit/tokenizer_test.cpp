#include "fsdpp/data/tokenizer.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "fsdpp/base/error.h"

namespace fsdpp::data {
namespace {

/// What escape_bytes promises to be able to undo.
std::string unescape(const std::string& escaped) {
  std::string bytes;
  for (size_t i = 0; i < escaped.size(); ++i) {
    const bool escape = escaped.compare(i, 2, "\\x") == 0 && escaped.size() - i >= 4 &&
                        escaped.find_first_not_of("0123456789abcdefABCDEF", i + 2) >= i + 4;
    bytes += escape ? static_cast<char>(std::stoi(escaped.substr(i + 2, 2), nullptr, 16)) : escaped[i];
    i += escape ? 3 : 0;
  }
  return bytes;
}

TEST(ByteTokenizer, EveryByteGoesThereAndBack) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  const std::vector<Token> tokens = ByteTokenizer::encode(bytes);
  ASSERT_EQ(tokens.size(), 256U);
  for (size_t i = 0; i < tokens.size(); ++i) EXPECT_EQ(tokens[i], i);
  EXPECT_EQ(ByteTokenizer::decode(tokens), bytes);
}

TEST(ByteTokenizer, DecodeLeavesBoundariesOut) {
  const std::vector<int64_t> ids = {256, 'a', 'b', 256, 'c'};
  EXPECT_EQ(ByteTokenizer::decode(ids), "abc");
  EXPECT_EQ(ByteTokenizer::decode(std::vector<Token>{}), "");
}

TEST(ByteTokenizer, DecodeNamesAnIdOutsideTheVocabulary) {
  for (const int64_t bad : {int64_t{257}, int64_t{-1}, int64_t{1} << 40}) {
    try {
      (void)ByteTokenizer::decode(std::vector<int64_t>{65, 66, bad});
      FAIL() << bad << " was taken";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bad) + " at position 2"), std::string::npos)
          << error.what();
    }
  }
}

TEST(ByteTokenizer, AppendKeepsWhatIsThere) {
  std::vector<Token> tokens = {ByteTokenizer::kBoundary};
  ByteTokenizer::append("\xff!", tokens);
  EXPECT_EQ(tokens, (std::vector<Token>{256, 255, 33}));
}

TEST(EscapeBytes, LeavesPrintableTextAlone) {
  const std::string printable = "plain ~ text\n\twith \u00e9, \u20ac, \u4e2d and \U0001f600";
  EXPECT_EQ(escape_bytes(printable), printable);
}

TEST(EscapeBytes, EscapesControls) {
  EXPECT_EQ(escape_bytes(std::string_view("\0\x07\r\x1b[31m\x7f", 9)), "\\x00\\x07\\x0d\\x1b[31m\\x7f");
  EXPECT_EQ(escape_bytes("a\n\tb", LineBreaks::escape), "a\\x0a\\x09b");
  EXPECT_EQ(escape_bytes("\u0085\u009b"), "\\xc2\\x85\\xc2\\x9b");  // C1: terminals obey them
  EXPECT_EQ(escape_bytes("\u202e\u2028\ufeff\u200f\u2066"),
            "\\xe2\\x80\\xae\\xe2\\x80\\xa8\\xef\\xbb\\xbf\\xe2\\x80\\x8f\\xe2\\x81\\xa6");
  EXPECT_EQ(escape_bytes("\u00a0\u200a\u2010\u202f\u2070"), "\u00a0\u200a\u2010\u202f\u2070");
}

TEST(EscapeBytes, EscapesBackslashesThatReadAsEscapesAlone) {
  for (const char* plain : {"Largo \\Lar\"go\\, a.", "\\x", "\\x4", "\\x4g", "\\\\", "\\n"}) {
    EXPECT_EQ(escape_bytes(plain), plain);
  }
  EXPECT_EQ(escape_bytes("\\x41"), "\\x5cx41");
  EXPECT_EQ(escape_bytes("\\\\xFF"), "\\\\x5cxFF");
  EXPECT_EQ(escape_bytes("\\\xff"), "\\\\xff");
  for (const char* bytes : {"\\x41", "\\\\xFF", "\\\xff", "\\x5cx41", "\\x\xff", "\\x5\x1b", "\\\\x5c\\x"}) {
    EXPECT_EQ(unescape(escape_bytes(bytes)), bytes);
  }
}

TEST(EscapeBytes, EscapesWhatIsNoUtf8) {
  EXPECT_EQ(escape_bytes("caf\xe9 au"), "caf\\xe9 au");                          // Latin-1
  EXPECT_EQ(escape_bytes("\xe2\x82"), "\\xe2\\x82");                             // cut short
  EXPECT_EQ(escape_bytes("\xe2\x82x"), "\\xe2\\x82x");                           // cut by a letter
  EXPECT_EQ(escape_bytes("\xc0\xaf\xe0\x80\xaf"), "\\xc0\\xaf\\xe0\\x80\\xaf");  // too long forms of '/'
  EXPECT_EQ(escape_bytes("\xed\xa0\x80"), "\\xed\\xa0\\x80");                    // surrogate
  EXPECT_EQ(escape_bytes("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");           // above U+10FFFF
  EXPECT_EQ(escape_bytes("\xf0\x8f\xbf\xbf"), "\\xf0\\x8f\\xbf\\xbf");           // too long form of U+FFFF
  EXPECT_EQ(escape_bytes("\xf4\x8f\xbf\xbf"), "\xf4\x8f\xbf\xbf");               // U+10FFFF itself
  EXPECT_EQ(escape_bytes("\x80\xff"), "\\x80\\xff");
}

TEST(EscapeBytes, EveryPairOfBytesComesOutPrintableAndCanBeHadBack) {
  for (int first = 0; first < 256; ++first) {
    for (int second = 0; second < 256; ++second) {
      const std::string bytes = {static_cast<char>(first), static_cast<char>(second)};
      const std::string escaped = escape_bytes(bytes, LineBreaks::escape);
      ASSERT_EQ(unescape(escaped), bytes);
      // A pair is at most one two-byte character: then U+00A0..U+07FF.
      for (size_t i = 0; i < escaped.size(); ++i) {
        const auto byte = static_cast<uint8_t>(escaped[i]);
        if (byte >= 0x80) {
          ASSERT_EQ(escaped.size(), 2U) << first << " " << second;
          ASSERT_TRUE(first >= 0xc2 && first <= 0xdf && second >= 0x80 && second <= 0xbf);
        } else {
          ASSERT_TRUE(byte >= 0x20 && byte != 0x7f) << first << " " << second;
        }
      }
    }
  }
}

}  // namespace
}  // namespace fsdpp::data
