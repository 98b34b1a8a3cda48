#include "fsdpp/observe/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "fsdpp/base/error.h"
#include "fsdpp/observe/resident.h"
#include "fsdpp/observe/table.h"

namespace fsdpp::observe {
namespace {

class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fsdpp-metrics-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  [[nodiscard]] std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(Metrics, KeepsTypesAndOrder) {
  const std::string line = to_json({{"step", int64_t{3}},
                                    {"loss", 2.5},
                                    {"done", false},
                                    {"name", std::string("a \"b\"\n")},
                                    {"bytes", std::vector<int64_t>{1, 2}}});
  EXPECT_EQ(line, R"({"step":3,"loss":2.5,"done":false,"name":"a \"b\"\n","bytes":[1,2]})");
}

TEST(Metrics, NumbersThatJsonCannotSayAreNull) {
  const std::string line = to_json({{"a", std::nan("")}, {"b", std::numeric_limits<double>::infinity()}});
  EXPECT_EQ(line, R"({"a":null,"b":null})");
}

TEST(Metrics, EveryStringOfBytesIsValidJson) {
  std::string bytes;
  for (int b = 0; b < 256; ++b) bytes += static_cast<char>(b);
  for (int b = 255; b >= 0; --b) bytes += static_cast<char>(b);
  bytes += "\xE2\x82";  // a sequence cut off by the end
  const auto json = nlohmann::json::parse(to_json({{"sample", bytes}, {bytes, true}}));
  const auto text = json["sample"].get<std::string>();
  EXPECT_NE(text.find("\\x80"), std::string::npos);
  EXPECT_TRUE(text.ends_with("\\xe2\\x82"));
}

TEST(Metrics, Utf8StaysAndWhatOnlyLooksLikeItIsEscaped) {
  EXPECT_EQ(valid_utf8("z\xC3\xA4 \xE2\x82\xAC \xF0\x9F\x98\x80"), "z\xC3\xA4 \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(valid_utf8("\xC0\x80"), "\\xc0\\x80");                    // overlong
  EXPECT_EQ(valid_utf8("\xED\xA0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // past U+10FFFF
  EXPECT_EQ(valid_utf8("\xE2\x28\xA1"), "\\xe2(\\xa1");
}

TEST(Metrics, WriterMakesFoldersAndEveryLineIsThereAtOnce) {
  const Folder folder;
  const std::string path = folder / "a/b/metrics.jsonl";
  MetricsWriter writer(path);
  writer.write({{"step", int64_t{1}}});
  EXPECT_EQ(contents(path), "{\"step\":1}\n");
  writer.write({{"step", int64_t{2}}});
  EXPECT_EQ(contents(path), "{\"step\":1}\n{\"step\":2}\n");
  MetricsWriter again(path);  // a new run replaces the file
  EXPECT_EQ(contents(path), "");
}

TEST(Metrics, WriterWithoutAPathWritesNothing) {
  MetricsWriter writer("");
  writer.write({{"step", int64_t{1}}});
}

TEST(Metrics, ErrorsNameThePath) {
  const Folder folder;
  std::ofstream(folder / "file") << "x";
  const std::string below = folder / "file/metrics.jsonl";
  try {
    MetricsWriter writer(below);
    FAIL() << "a file was taken for a folder";
  } catch (const EnvironmentError& error) {
    EXPECT_NE(std::string(error.what()).find(below), std::string::npos) << error.what();
  }
  EXPECT_THROW(write_results(folder / "", {}), EnvironmentError);
  MetricsWriter full("/dev/full");
  EXPECT_THROW(full.write({{"step", int64_t{1}}}), EnvironmentError);
}

TEST(Metrics, ResultsAreReplacedAsAWhole) {
  const Folder folder;
  const std::string path = folder / "results/train.json";
  write_results(path, {{"val_loss", 2.0}});
  write_results(path, {{"val_loss", 1.5}, {"rank_bytes", std::vector<int64_t>{7, 8}}});
  const auto json = nlohmann::json::parse(contents(path));
  EXPECT_EQ(json["val_loss"], 1.5);
  EXPECT_EQ(json["rank_bytes"], (std::vector<int64_t>{7, 8}));
  EXPECT_FALSE(std::filesystem::exists(path + ".new"));
}

TEST(Table, AlignsNamesLeftAndNumbersRight) {
  Table table({"unit", "bytes"});
  table.row({"layers.0", "1,024"});
  table.row({"\xC3\xA4", "8"});  // one column wide
  table.rule();
  table.row({"total", "1,032"});
  EXPECT_EQ(table.str(0),
            "unit      bytes\n"
            "---------------\n"
            "layers.0  1,024\n"
            "\xC3\xA4             8\n"
            "---------------\n"
            "total     1,032\n");
  EXPECT_THROW(table.row({"one cell"}), UsageError);
}

TEST(Table, Commas) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(-123456), "-123,456");
  EXPECT_EQ(with_commas(1234567890123), "1,234,567,890,123");
}

TEST(Resident, ReadsWhatTheSystemSays) {
  EXPECT_EQ(kilobytes_line("Name:\tx\nVmHWM:\t    9 kB\nVmRSS:\t    5 kB\n", "VmRSS"), 5 * 1024);
  EXPECT_EQ(kilobytes_line("Pss_Dirty: 7 kB\nPss: 3 kB", "Pss"), 3 * 1024);
  EXPECT_EQ(kilobytes_line("VmRSS: none", "VmRSS"), 0);
  EXPECT_EQ(kilobytes_line("", "VmRSS"), 0);
  const Resident before = resident();
  EXPECT_GT(before.now, 0);
  EXPECT_GE(before.peak, before.now / 2);
  std::vector<char> memory(64 << 20, 1);  // touched, so resident
  EXPECT_EQ(memory[memory.size() / 2], 1);
  const Resident after = resident();
  EXPECT_GE(after.now, before.now + (48 << 20));
  EXPECT_GE(after.own, before.own + (48 << 20));
  EXPECT_LE(after.own, after.now);
}

}  // namespace
}  // namespace fsdpp::observe
