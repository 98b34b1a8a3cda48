#include "fsdpp/data/reader.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <vector>

#include "fsdpp/base/error.h"
#include "tests/unit/data_files.h"

namespace fsdpp::data {
namespace {

namespace fs = std::filesystem;

std::string read_all(const fs::path& path, size_t block = 100000) {
  Reader reader(path);
  std::string bytes;
  std::vector<char> out(block);
  while (const size_t count = reader.read(out)) {
    bytes.append(out.data(), count);
    if (count == block) continue;
    EXPECT_EQ(reader.read(out), 0U) << "a short block comes at the end alone";
  }
  return bytes;
}

TEST(Reader, PlainTextInAnyBlockSize) {
  const TemporaryFolder folder;
  const std::string bytes = some_text(600000);  // more than two buffers
  const auto file = folder.write("plain.txt", bytes);
  for (const size_t block : {1009U, 262144U, 1000000U}) EXPECT_EQ(read_all(file, block), bytes);
  EXPECT_EQ(read_all(folder.write("empty.txt", "")), "");
  EXPECT_EQ(read_all(folder.write("one", "\x1f")), "\x1f");
}

TEST(Reader, GzipIsKnownByContent) {
  const TemporaryFolder folder;
  const std::string bytes = some_text(600000);
  for (const char* name : {"a.gz", "b.dz", "c.txt", "d"}) {
    EXPECT_EQ(read_all(folder.write(name, gzip(bytes))), bytes) << name;
  }
  EXPECT_EQ(read_all(folder.write("empty.gz", gzip(""))), "");
}

TEST(Reader, DictzipIsGzip) {
  const TemporaryFolder folder;
  const std::string bytes = some_text(300000);
  const std::string packed = gzip(bytes, 58315);  // dictzip's chunk
  ASSERT_EQ(packed[3], 4) << "an extra field is in the header";
  EXPECT_EQ(read_all(folder.write("words.dict.dz", packed)), bytes);
}

TEST(Reader, MembersFollowEachOther) {
  const TemporaryFolder folder;
  std::string packed;
  std::string bytes;
  for (uint32_t member = 0; member < 40; ++member) {
    const std::string part = some_text(member * 997, member);
    packed += gzip(part);
    if (member % 7 == 0) packed += std::string(member, '\0');  // padding, as tapes leave it
    bytes += part;
  }
  EXPECT_GT(packed.size(), size_t{1} << 18);  // members also cross the reader's buffer
  for (const size_t block : {1U << 10, 1U << 20})
    EXPECT_EQ(read_all(folder.write("m.gz", packed), block), bytes);
}

TEST(Reader, LongRunsOutliveTheInput) {
  // The last few input bytes stand for megabytes, so output is still to come when the file is read to its
  // end.
  const TemporaryFolder folder;
  const std::string bytes(5000000, 'x');
  for (const size_t block : {1U, 4096U, 1U << 20}) {
    const std::string part = bytes.substr(0, block == 1 ? 3000 : bytes.size());
    EXPECT_EQ(read_all(folder.write("run.gz", gzip(part)), block), part);
  }
}

TEST(Reader, EveryTruncationIsFound) {
  const TemporaryFolder folder;
  const std::string packed = gzip(some_text(500));
  for (size_t size = 0; size < packed.size(); ++size) {
    const auto file = folder.write("cut.gz", packed.substr(0, size));
    const std::string message = message_of<UsageError>([&] { (void)read_all(file); });
    ASSERT_NE(message.find("cut.gz"), std::string::npos) << size << ": " << message;
    ASSERT_NE(message.find("truncated"), std::string::npos) << size << ": " << message;
    ASSERT_NE(message.find("again"), std::string::npos) << message;
  }
  const auto second = folder.write("cut.gz", packed + packed.substr(0, packed.size() / 2));
  EXPECT_THROW((void)read_all(second), UsageError);
}

TEST(Reader, DamageIsFound) {
  const TemporaryFolder folder;
  std::string packed = gzip(some_text(5000));
  packed[packed.size() - 6] ^= 1;  // its CRC
  const auto file = folder.write("bad.gz", packed);
  const std::string message = message_of<UsageError>([&] { (void)read_all(file); });
  EXPECT_NE(message.find("bad.gz"), std::string::npos) << message;
  EXPECT_NE(message.find("damaged"), std::string::npos) << message;
  EXPECT_THROW((void)read_all(folder.write("tail.gz", gzip("text") + "garbage")), UsageError);
}

TEST(Reader, OtherPackingsAreNamed) {
  using namespace std::string_view_literals;
  const TemporaryFolder folder;
  for (const auto& [bytes, tool] : {std::pair{"\xfd\x37zXZ\0rest"sv, "xz"},
                                    {"\x28\xb5\x2f\xfdrest"sv, "zstd"},
                                    {"BZh91AY&SY\0\0"sv, "bzip2"},
                                    {"PK\x03\x04rest"sv, "zip"}}) {
    const auto file = folder.write("packed", bytes);
    const std::string message = message_of<UsageError>([&] { Reader reader(file); });
    EXPECT_NE(message.find(tool), std::string::npos) << message;
  }
  EXPECT_EQ(read_all(folder.write("text", "BZh is text too")), "BZh is text too");
  const auto lying = folder.write("plain.gz", "no gzip");
  EXPECT_NE(message_of<UsageError>([&] { Reader reader(lying); }).find("no gzip data"), std::string::npos);
}

TEST(ListSources, DirectoriesAreSortedAndFiltered) {
  const TemporaryFolder folder;
  folder.write("b.txt", "b");
  folder.write("a/z.txt", "az");
  folder.write("a/c/d.gz", gzip("d"));
  folder.write("a.txt", "a");
  folder.write(".hidden", "no");
  folder.write(".git/objects", "no");
  folder.write("old.tokens", "no");
  fs::create_directory_symlink(folder.path(), folder.path() / "loop");
  fs::create_symlink(folder.path() / "b.txt", folder.path() / "link.txt");
  std::vector<std::string> names;
  for (const Source& source : list_sources(folder.path())) {
    names.push_back(fs::relative(source.path.parent_path(), folder.path()) / source.path.filename());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"./a.txt", "a/c/d.gz", "a/z.txt", "./b.txt", "./link.txt"}));
}

TEST(ListSources, MissingAndUnfitPathsAreNamed) {
  const TemporaryFolder folder;
  const auto missing = folder.path() / "missing.txt";
  const std::string message = message_of<UsageError>([&] { (void)list_sources(missing); });
  EXPECT_NE(message.find("missing.txt' does not exist; give"), std::string::npos) << message;
  EXPECT_THROW((void)list_sources(""), UsageError);
  EXPECT_NE(message_of<UsageError>([&] { (void)list_sources(folder.path()); }).find("no regular file"),
            std::string::npos);
  const auto pipe = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_NE(message_of<UsageError>([&] { (void)list_sources(pipe); }).find("regular file"),
            std::string::npos);
  EXPECT_NE(message_of<UsageError>([&] { Reader reader(missing); }).find("cannot be opened"),
            std::string::npos);
}

}  // namespace
}  // namespace fsdpp::data
