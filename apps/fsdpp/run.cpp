#include "apps/fsdpp/run.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "apps/fsdpp/cli.h"
#include "apps/fsdpp/config.h"
#include "apps/fsdpp/device_choice.h"
#include "apps/fsdpp/exit_code.h"
#include "apps/fsdpp/launcher.h"
#include "apps/fsdpp/train.h"
#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/data/corpus.h"

namespace fsdpp::app {
namespace {

void say(const std::string& message) { std::fprintf(stderr, "fsdpp: %s\n", message.c_str()); }

/// Number of ranks from the environment and from --ranks, which must not contradict each other.
int ranks_of(const comm::Identity& identity, const Arguments& arguments) {
  require(identity.ranks == 1 || arguments.ranks == 0 || arguments.ranks == identity.ranks, "--ranks ",
          arguments.ranks, ": a launcher has started ", identity.ranks,
          " ranks (WORLD_SIZE or its like); expected the same number: leave --ranks out");
  return identity.ranks > 1 ? identity.ranks : std::max(arguments.ranks, 1);
}

data::Corpus prepare_text(const DataConfig& config) {
  try {
    return data::Corpus::prepare(config.text, config.cache);
  } catch (const UsageError& error) {
    throw UsageError(text("data.text = \"", config.text, "\": ", error.what()));
  } catch (const EnvironmentError& error) {
    throw UsageError(text(error.retryable() ? "data.text" : "data.cache", " = \"",
                          error.retryable() ? config.text : config.cache, "\": ", error.what()));
  }
}

/// Reads and checks; `command` then names a configuration that others can read too.
Config prepare_config(const Arguments& arguments, int ranks, std::vector<std::string>& command) {
  const std::string& path = arguments.config_path;
  const std::string content = path.empty() ? "" : read_config(path);
  Config config = load_config(path, content, arguments.overrides);
  check_config(config, path, ranks);
  if (!path.empty()) command.insert(command.end(), {"--config", kept_config(content)});
  return config;
}

data::Corpus prepare_checked_text(const Config& config) {
  data::Corpus corpus = prepare_text(config.data);
  const data::Split split = corpus.split(config.data.validation_fraction);
  check_text(config, static_cast<int64_t>(split.train.size()), static_cast<int64_t>(split.validation.size()));
  return corpus;
}

/// 128 plus the signal. A Ctrl-C meets all ranks at once: one of them says so.
int stopped(const std::string& message, bool first) {
  if (first || interrupt_signal() != SIGINT) say(message);
  return kSignalBase + interrupt_signal();
}

/// Does what the command line says, as one rank or as the launcher of several. Sets `on_gpu` once this
/// process computes there.
int execute(int argc, char** argv, const comm::Identity& identity, bool& on_gpu) {
  const bool first = identity.rank == 0;
  bool checked = false;  // from here on errors are a rank's own; before, every rank finds the same ones
  try {
    const Arguments arguments = parse_arguments(argc, argv);
    if (!arguments.answer.empty()) {
      if (first) std::fputs(arguments.answer.c_str(), stdout);
      return 0;
    }
    const int ranks = ranks_of(identity, arguments);
    // Everything that can be wrong with the user's input is found before a rank is started or peers are met.
    std::vector<std::string> command(argv, argv + argc);
    const Config config = prepare_config(arguments, ranks, command);
    Place place = choose_place(arguments.device, identity, ranks, command);
    catch_interrupts();
    const data::Corpus corpus = prepare_checked_text(config);
    checked = true;
    if (ranks > identity.ranks) return launch(ranks, std::move(command));
    on_gpu = place.gpu >= 0;
    if (on_gpu) place.gpu = gpu_of(identity, place.shared);
    train(config, corpus, identity, place);
    return 0;
  } catch (const UsageError& error) {
    if (first || checked) say(error.what());
    return kBadUsage;
  } catch (const Interrupted& error) {
    return stopped(error.what(), first);
  } catch (const PeerError& error) {
    if (interrupted()) return kSignalBase + interrupt_signal();  // the peer heard the signal a moment earlier
    say(error.what());
    return kLostPeer;
  }
}

/// Where a stream is closed, the next file that is opened would be it, and get what is printed.
void open_missing_streams() noexcept {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) < 0 && errno == EBADF) static_cast<void>(open("/dev/null", O_RDWR));
  }
}

/// execute(), with every exception as an exit code.
int guarded(int argc, char** argv, bool& on_gpu) noexcept {
  try {
    return execute(argc, argv, comm::identity_from_environment(), on_gpu);
  } catch (const UsageError& error) {  // of the launcher's variables
    say(error.what());
    return kBadUsage;
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    const bool memory = dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
                        what.find("can't allocate memory") != std::string::npos;
    say(what + (memory ? "; use more ranks, a smaller model or batch, or a larger machine" : ""));
  } catch (const std::exception& error) {
    say(error.what());
  } catch (...) {
    say("an exception that says nothing");
  }
  return kFailed;
}

}  // namespace

int run(int argc, char** argv) noexcept {
  open_missing_streams();
  bool on_gpu = false;
  int code = guarded(argc, argv, on_gpu);
  if (code == 0 && std::fflush(stdout) != 0) {
    say(text("cannot write to standard output: ", std::strerror(errno), "; give it room"));
    code = kFailed;
  }
  if (code != 0 && on_gpu) {  // see train(): nothing more may wait for the GPU, nor what ends CUDA at exit
    std::fflush(nullptr);
    std::_Exit(code);
  }
  return code;
}

}  // namespace fsdpp::app
