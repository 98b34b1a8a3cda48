#include "apps/fsdpp/run.h"

#include <c10/util/Exception.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "apps/fsdpp/cli.h"
#include "apps/fsdpp/config.h"
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

/// Everything that can be wrong with the user's input is found here, before a rank is started or peers are
/// met.
struct Prepared {
  Config config;
  data::Corpus corpus;
};

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

Prepared prepare(const Arguments& arguments, int ranks) {
  Config config = load_config(arguments.config_path, arguments.overrides);
  check_config(config, ranks);
  data::Corpus corpus = prepare_text(config.data);
  const data::Split split = corpus.split(config.data.validation_fraction);
  check_text(config, static_cast<int64_t>(split.train.size()), static_cast<int64_t>(split.validation.size()));
  return {std::move(config), std::move(corpus)};
}

/// 128 plus the signal; every rank but one leaves a Ctrl-C to the terminal's prompt.
int stopped(const std::string& message, bool speaks) {
  if (speaks || interrupt_signal() != SIGINT) say(message);
  return kSignalBase + interrupt_signal();
}

int train_command(int argc, char** argv) {
  comm::Identity identity;
  bool speaks = true;
  try {
    identity = comm::identity_from_environment();
    speaks = identity.rank == 0;
    const Arguments arguments = parse_arguments(argc, argv);
    if (!arguments.answer.empty()) {
      if (speaks) std::fputs(arguments.answer.c_str(), stdout);
      return 0;
    }
    const int ranks = ranks_of(identity, arguments);
    catch_interrupts();
    Prepared prepared = prepare(arguments, ranks);
    if (ranks > identity.ranks) return launch(ranks, std::vector<std::string>(argv, argv + argc));
    train(prepared.config, prepared.corpus, identity);
    return 0;
  } catch (const UsageError& error) {
    if (speaks) say(error.what());
    return kBadUsage;
  } catch (const Interrupted& error) {
    return stopped(error.what(), speaks);
  } catch (const PeerError& error) {
    if (interrupted()) return stopped(error.what(), false);  // the peer was stopped a moment earlier
    say(error.what());
    return kLostPeer;
  }
}

}  // namespace

int run(int argc, char** argv) noexcept {
  try {
    return train_command(argc, argv);
  } catch (const c10::Error& error) {
    say(error.what_without_backtrace());
  } catch (const std::exception& error) {
    say(error.what());
  } catch (...) {
    say("an exception that says nothing");
  }
  return kFailed;
}

}  // namespace fsdpp::app
