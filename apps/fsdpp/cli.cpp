// The command line, made from the table of values. The only file that sees CLI11.
#include "apps/fsdpp/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <utility>

#include "apps/fsdpp/config_table.h"
#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

constexpr const char* kAbout =
    "FSDP++: fully sharded data-parallel training on libtorch.\n"
    "Example: fsdpp train --config configs/small.toml --ranks 4 --data.text book.txt --train.steps 100\n";
constexpr const char* kAboutTrain = "Train a Llama on text: fsdpp train --help lists every value";
constexpr const char* kNotes =
    "A name that only one section has goes without it too: --steps 100, --strategy optim.\n"
    "Values come from their defaults [in brackets], then the TOML file, then the command line.\n"
    "On one machine --ranks starts the processes; under torchrun, mpirun or srun rank and world come from "
    "the\n"
    "environment.";
constexpr int kMaxRanks = 1024;

/// "strategy" and "delay-wgrad" for "sharding.strategy" and "sharding.delay_wgrad", where no other section
/// has such a name.
std::string short_options(const std::string& key) {
  const auto name = [](std::string_view of) { return of.substr(of.find('.') + 1); };
  const std::vector<std::string> all = keys();
  const auto same = [&](const std::string& other) { return name(other) == name(key); };
  if (std::count_if(all.begin(), all.end(), same) > 1) return "";
  std::string hyphens(name(key));
  std::replace(hyphens.begin(), hyphens.end(), '_', '-');
  const std::string plain(name(key));
  return ",--" + plain + (hyphens == plain ? "" : ",--" + hyphens);
}

struct Given {
  std::string config_path;
  std::string ranks;
  std::string device;
  std::map<std::string, std::string> values;  // by key
};

void add_options(CLI::App& train, Given& given) {
  train.add_option("--config", given.config_path, "TOML file with the values below")->type_name("FILE");
  train.add_option("--ranks", given.ranks, "processes to start on this machine [1]")->type_name("N");
  train
      .add_option(
          "--device", given.device,
          "where ranks compute: auto (GPUs where there are some), cpu, cuda, cuda-shared (ranks take turns "
          "on the GPUs: slow) [auto]")
      ->type_name("NAME");
  for (const Entry& entry : entries()) {
    const std::string key(entry.key);
    const std::string preset = default_text(entry);
    const std::string help =
        text(entry.help, "; ", expected(entry), preset.empty() ? "" : text(" [", preset, "]"));
    train.add_option("--" + key + short_options(key), given.values[key], help)
        ->type_name("VALUE")
        ->group("[" + key.substr(0, key.find('.')) + "]");
  }
}

/// CLI11 lets what it does not know through; here it becomes one line with the nearest name.
void refuse_rest(const std::vector<std::string>& rest, std::vector<std::string> names, const char* kind) {
  if (rest.empty()) return;
  const std::string word = rest.front().substr(0, rest.front().find('='));
  if (word.starts_with("-")) {
    const auto near = nearest(word.substr(std::min(word.find_first_not_of('-'), word.size())), names);
    throw UsageError(text(word, " is not an option",
                          near.empty() ? "; see fsdpp train --help" : "; did you mean --" + near + "?"));
  }
  throw UsageError(text("\"", word, "\" is not expected: expected ", kind, "; see fsdpp --help"));
}

int parse_ranks(const std::string& text_of_ranks) {
  const bool digits =
      !text_of_ranks.empty() && text_of_ranks.size() < 6 &&
      std::all_of(text_of_ranks.begin(), text_of_ranks.end(), [](char c) { return c >= '0' && c <= '9'; });
  const int ranks = digits ? std::stoi(text_of_ranks) : 0;
  require(ranks >= 1 && ranks <= kMaxRanks, "--ranks \"", text_of_ranks,
          "\": expected a whole number from 1 to ", kMaxRanks, "; write for example --ranks 4");
  return ranks;
}

DeviceChoice parse_device(const std::string& name) {
  if (name == "auto") return DeviceChoice::automatic;
  if (name == "cpu") return DeviceChoice::cpu;
  if (name == "cuda-shared") return DeviceChoice::cuda_shared;
  require(name == "cuda", "--device \"", name,
          "\": expected one of auto, cpu, cuda, cuda-shared; write for example --device cuda");
  return DeviceChoice::cuda;
}

/// The words behind the program's name, last first, as CLI11 wants them. It would take the word behind
/// "--name=" for the value, which is empty.
std::vector<std::string> words_of(int argc, const char* const* argv) {
  std::vector<std::string> words;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    const bool empty = word.starts_with("--") && word.find('=') == word.size() - 1;
    if (empty) word.pop_back();
    words.push_back(std::move(word));
    if (empty) words.emplace_back();
  }
  std::reverse(words.begin(), words.end());
  return words;
}

Arguments collect(const CLI::App& train, const Given& given) {
  Arguments out;
  out.config_path = given.config_path;
  if (train.count("--ranks") > 0) out.ranks = parse_ranks(given.ranks);
  if (train.count("--device") > 0) out.device = parse_device(given.device);
  if (train.count("--config") > 0) {
    require(!given.config_path.empty(),
            "--config \"\": expected a TOML file; name one or leave --config out");
  }
  for (const auto& [key, value] : given.values) {
    if (train.count("--" + key) > 0) out.overrides.emplace_back(key, value);
  }
  return out;
}

}  // namespace

Arguments parse_arguments(int argc, const char* const* argv) {
  CLI::App app(kAbout, "fsdpp");
  app.set_version_flag("--version", "fsdpp " FSDPP_VERSION);
  app.allow_extras();
  CLI::App* train = app.add_subcommand("train", kAboutTrain);
  train->allow_extras();
  train->footer(kNotes);
  Given given;
  add_options(*train, given);
  // The last of several: a script's defaults can be overridden at the end of its command line.
  for (CLI::Option* option : train->get_options())
    option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  try {
    app.parse(words_of(argc, argv));
  } catch (const CLI::CallForVersion&) {
    return {.answer = app.version() + "\n"};
  } catch (const CLI::CallForHelp&) {
    return {.answer = app.help()};
  } catch (const CLI::CallForAllHelp&) {
    return {.answer = app.help("", CLI::AppFormatMode::All)};
  } catch (const CLI::ParseError& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    throw UsageError(message + "; see fsdpp train --help");
  }
  std::vector<std::string> names = keys();
  names.insert(names.end(), {"config", "device", "ranks", "help"});
  if (!train->parsed()) {
    refuse_rest(app.remaining(), {"help", "version"}, "a command (train)");
    throw UsageError("no command given: expected train; see fsdpp --help");
  }
  refuse_rest(app.remaining(), names, "nothing behind --");  // which ends a command's options
  refuse_rest(train->remaining(true), names, "an option that begins with --");
  return collect(*train, given);
}

}  // namespace fsdpp::app
