#include "fsdpp/data/corpus.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "tests/unit/data_files.h"

namespace fsdpp::data {
namespace {

namespace fs = std::filesystem;

/// "<" for a boundary, bytes as they are.
std::string shown(std::span<const Token> tokens) {
  std::string out;
  for (const Token token : tokens) out += token == ByteTokenizer::kBoundary ? '<' : static_cast<char>(token);
  return out;
}

std::vector<std::string> names_in(const fs::path& folder, const std::string& ending) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(ending)) names.push_back(name);
  }
  return names;
}

class CorpusTest : public ::testing::Test {
 protected:
  [[nodiscard]] Corpus prepare(const fs::path& path) const { return Corpus::prepare(path, cache()); }
  [[nodiscard]] fs::path cache() const { return folder_.path() / "cache"; }
  TemporaryFolder folder_;
};

TEST_F(CorpusTest, AFileIsOneDocument) {
  const std::string bytes = some_text(1500000);  // more than a block and a write
  const Corpus corpus = prepare(folder_.write("text", bytes));
  EXPECT_TRUE(corpus.built());
  EXPECT_EQ(corpus.info().documents, 1);
  EXPECT_EQ(corpus.info().text_bytes, 1500000);
  EXPECT_EQ(corpus.info().tokens, 1500001);
  EXPECT_EQ(corpus.info().vocabulary, 257);
  EXPECT_EQ(corpus.tokens().front(), ByteTokenizer::kBoundary);
  EXPECT_EQ(ByteTokenizer::decode(corpus.tokens()), bytes);
}

TEST_F(CorpusTest, TokensDoNotDependOnThePacking) {
  const std::string bytes = some_text(700000);
  const Corpus plain = prepare(folder_.write("text", bytes));
  for (const auto& file :
       {folder_.write("text.gz", gzip(bytes)), folder_.write("text.dict.dz", gzip(bytes, 58315)),
        folder_.write("two.gz", gzip(bytes.substr(0, 9)) + gzip(bytes.substr(9)))}) {
    const Corpus packed = prepare(file);
    EXPECT_TRUE(std::ranges::equal(packed.tokens(), plain.tokens())) << file;
    EXPECT_EQ(packed.info().content_hash, plain.info().content_hash);
    EXPECT_NE(packed.info().fingerprint, plain.info().fingerprint);
  }
  const Corpus other = prepare(folder_.write("other", some_text(700000, 2)));
  EXPECT_NE(other.info().content_hash, plain.info().content_hash);
}

TEST_F(CorpusTest, ADirectoryIsADocumentPerFile) {
  folder_.write("texts/b", "second");
  folder_.write("texts/a.gz", gzip("first"));
  folder_.write("texts/sub/c", "\xff third");
  folder_.write("texts/empty", "");
  folder_.write("texts/picture", std::string_view("\x89PNG\0\0\0", 7));
  folder_.write("texts/.hidden", "no");
  const Corpus corpus = prepare(folder_.path() / "texts");
  EXPECT_EQ(shown(corpus.tokens()), "<first<second<\xff third");
  EXPECT_EQ(corpus.info().documents, 3);
}

TEST_F(CorpusTest, ADirectoryMayHoldItsOwnCache) {
  folder_.write("text", "words");
  const Corpus first = Corpus::prepare(folder_.path(), folder_.path());
  const Corpus second = Corpus::prepare(folder_.path().string() + "/", folder_.path());
  EXPECT_TRUE(first.built());
  EXPECT_FALSE(second.built());
  EXPECT_EQ(shown(second.tokens()), "<words");
}

TEST_F(CorpusTest, IsReusedUntilASourceChanges) {
  const auto file = folder_.write("texts/a", "one");
  EXPECT_TRUE(prepare(folder_.path() / "texts").built());
  EXPECT_FALSE(prepare(folder_.path() / "texts").built());

  folder_.write("texts/a", "longer");  // size
  const Corpus longer = prepare(folder_.path() / "texts");
  EXPECT_TRUE(longer.built());
  EXPECT_EQ(shown(longer.tokens()), "<longer");

  folder_.write("texts/a", "LONGER");  // time alone
  fs::last_write_time(file, fs::last_write_time(file) + std::chrono::nanoseconds(1000));
  const Corpus changed = prepare(folder_.path() / "texts");
  EXPECT_TRUE(changed.built());
  EXPECT_EQ(shown(changed.tokens()), "<LONGER");
  EXPECT_EQ(shown(longer.tokens()), "<longer") << "an open corpus outlives its file";

  fs::rename(file, folder_.path() / "texts/b");  // path
  EXPECT_TRUE(prepare(folder_.path() / "texts").built());
  EXPECT_EQ(names_in(cache(), ".tokens").size(), 1U);
}

TEST_F(CorpusTest, ADamagedTokenFileIsRefusedAndMadeAgain) {
  const auto file = folder_.write("text", some_text(5000));
  const fs::path tokens = Corpus::token_path(file, cache());
  EXPECT_TRUE(prepare(file).built());
  const std::string whole = file_bytes(tokens);
  std::string flipped = whole;
  flipped[20] ^= 4;
  std::string version = whole;
  version[8] += 1;
  const std::vector<std::string> damaged = {
      "",      whole.substr(0, 63), whole.substr(0, whole.size() - 1), flipped, whole.substr(0, 64),
      version, whole + "xx",        std::string(whole.size(), '\0')};
  for (const std::string& bytes : damaged) {
    folder_.write(fs::relative(tokens, folder_.path()).string(), bytes);
    const std::string message = message_of<EnvironmentError>([&] { const TokenFile open(tokens); });
    EXPECT_NE(message.find(tokens.string()), std::string::npos) << message;
    EXPECT_NE(message.find("delete it"), std::string::npos) << message;
    EXPECT_TRUE(prepare(file).built());
    EXPECT_EQ(file_bytes(tokens), whole);
  }
}

TEST_F(CorpusTest, LeftoversOfACrashAreIgnoredAndDeleted) {
  const auto file = folder_.write("text", "words");
  const fs::path tokens = Corpus::token_path(file, cache());
  const std::string crashed = "cache/." + tokens.filename().string() + ".4711-99.tmp";
  folder_.write(crashed, "half a file");
  folder_.write("cache/.other.tokens.4711-99.tmp", "of another text, perhaps at work");
  EXPECT_EQ(shown(prepare(file).tokens()), "<words");
  EXPECT_EQ(names_in(cache(), ".tmp"), std::vector<std::string>{".other.tokens.4711-99.tmp"});
}

TEST_F(CorpusTest, AFailedPreparationLeavesNothing) {
  const std::string packed = gzip(some_text(3000000));
  const auto file = folder_.write("cut.gz", packed.substr(0, packed.size() - 100));
  const std::string message = message_of<UsageError>([&] { (void)prepare(file); });
  EXPECT_NE(message.find("cut.gz"), std::string::npos) << message;
  EXPECT_TRUE(names_in(cache(), ".tmp").empty());
  EXPECT_TRUE(names_in(cache(), ".tokens").empty());
  folder_.write("cut.gz", packed);  // fetched again
  EXPECT_EQ(prepare(file).info().text_bytes, 3000000);
}

TEST_F(CorpusTest, ThreadsPrepareAtOnceAndOneBuilds) {
  constexpr int kThreads = 8;
  const std::string bytes = some_text(2000000);
  const auto file = folder_.write("text.gz", gzip(bytes));
  std::barrier start(kThreads);
  std::vector<std::optional<Corpus>> corpora(kThreads);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        corpora[static_cast<size_t>(i)] = prepare(file);
      });
    }
  }
  int built = 0;
  for (const auto& corpus : corpora) {
    ASSERT_TRUE(corpus.has_value());
    built += corpus->built() ? 1 : 0;
    EXPECT_EQ(corpus->info().tokens, 2000001);
    EXPECT_EQ(ByteTokenizer::decode(corpus->tokens()), bytes);
  }
  EXPECT_EQ(built, 1);
  EXPECT_TRUE(names_in(cache(), ".tmp").empty());
}

TEST_F(CorpusTest, WritersWithoutALockDoNotMix) {
  // Where the file system has no locks several write; each reader must still see one of them whole.
  fs::create_directories(cache());
  const fs::path path = cache() / "race.tokens";
  constexpr int kThreads = 4;
  std::barrier start(kThreads);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 5; ++round) {
          start.arrive_and_wait();
          TokenFileWriter writer(path);
          writer.append(std::vector<Token>(static_cast<size_t>(1000 * (i + 1)), static_cast<Token>(i)));
          writer.finish({});
          const TokenFile file(path);
          const Token author = file.tokens().front();
          EXPECT_EQ(file.info().tokens, 1000 * (author + 1));
          EXPECT_EQ(std::ranges::count(file.tokens(), author), file.info().tokens);
        }
      });
    }
  }
  EXPECT_TRUE(names_in(cache(), ".tmp").empty());
}

TEST_F(CorpusTest, SplitsAreDisjointAndCoverAll) {
  const Corpus corpus = prepare(folder_.write("text", some_text(9999)));
  ASSERT_EQ(corpus.tokens().size(), 10000U);
  for (const double fraction : {0.0, 0.00001, 0.01, 0.1, 0.5, 0.99999}) {
    const Split split = corpus.split(fraction);
    EXPECT_EQ(split.train.data(), corpus.tokens().data());
    EXPECT_EQ(split.train.data() + split.train.size(), split.validation.data());
    EXPECT_EQ(split.train.size() + split.validation.size(), corpus.tokens().size());
    EXPECT_NEAR(static_cast<double>(split.validation.size()), 10000 * fraction, 0.51);
  }
  for (const double bad : {-0.1, 1.0, std::nan("")}) {
    EXPECT_NE(message_of<UsageError>([&] { (void)corpus.split(bad); }).find("validation fraction"),
              std::string::npos);
  }
}

TEST_F(CorpusTest, EmptyTextsAreNamed) {
  for (const auto& file : {folder_.write("empty.txt", ""), folder_.write("empty.gz", gzip(""))}) {
    const std::string message = message_of<UsageError>([&] { (void)prepare(file); });
    EXPECT_NE(message.find(file.string() + "' is empty; give"), std::string::npos) << message;
  }
  folder_.write("folder/picture", std::string_view("\0\1", 2));
  EXPECT_NE(message_of<UsageError>([&] { (void)prepare(folder_.path() / "folder"); }).find("holds no text"),
            std::string::npos);
  EXPECT_THROW((void)prepare(folder_.path() / "missing"), UsageError);
  EXPECT_FALSE(fs::exists(cache() / "missing"));
}

TEST_F(CorpusTest, ACacheFolderThatIsNoneIsNamed) {
  const auto file = folder_.write("text", "words");
  for (const auto& bad : {file, file / "below"}) {
    const std::string message = message_of<EnvironmentError>([&] { (void)Corpus::prepare(file, bad); });
    EXPECT_NE(message.find(bad.string()), std::string::npos) << message;
    EXPECT_NE(message.find("give a writable cache folder"), std::string::npos) << message;
  }
  EXPECT_THROW((void)Corpus::prepare(file, ""), UsageError);
}

TEST_F(CorpusTest, CtrlCStopsIt) {
  const auto file = folder_.write("text", some_text(100));
  request_interrupt();
  EXPECT_THROW((void)prepare(file), Interrupted);
  request_interrupt(false);
  EXPECT_TRUE(names_in(cache(), ".tmp").empty());
  EXPECT_TRUE(prepare(file).built());
}

}  // namespace
}  // namespace fsdpp::data
