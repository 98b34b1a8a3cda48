#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"

namespace fsdpp::comm {
namespace {

/// The variables by which one kind of launcher says who a process is.
struct Family {
  const char* launcher;
  const char* rank;
  const char* ranks;
  const char* local;        // how large the part of the job on one host is
  bool local_counts_hosts;  // `local` is the number of hosts instead
};

constexpr Family kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", false};
constexpr std::array<Family, 3> kLaunchers = {{
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", false},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", false},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", true},
}};
constexpr int kDefaultPort = 29500;  // torch.distributed's

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

int number(const char* name, const std::string& value, int least, int most) {
  int result = 0;
  const char* const end = value.data() + value.size();
  const auto [stopped, error] = std::from_chars(value.data(), end, result);
  require(error == std::errc() && stopped == end && result >= least && result <= most,
          "environment variable ", name, "=\"", value, "\" is not a whole number from ", least, " to ", most);
  return result;
}

int needed_number(const char* name, const char* because, int least, int most) {
  const std::optional<std::string> value = variable(name);
  require(value.has_value(), "environment variable ", name, " is missing although ", because,
          " is set: start the program through one launcher, or unset ", because, " to run one rank");
  return number(name, *value, least, most);
}

bool truth(const char* name) {
  const std::string value = variable(name).value_or("");
  if (value == "True" || value == "true" || value == "1") return true;
  require(value.empty() || value == "False" || value == "false" || value == "0", "environment variable ",
          name, "=\"", value, "\" is neither True nor False");
  return false;
}

void read_ranks(const Family& family, Identity& identity) {
  constexpr int kMost = 1 << 20;
  identity.rank = needed_number(family.rank, family.ranks, 0, kMost);
  identity.ranks = needed_number(family.ranks, family.rank, 1, kMost);
  require(identity.rank < identity.ranks, "environment variables contradict each other: ", family.rank, "=",
          identity.rank, " but ", family.ranks, "=", identity.ranks, " (ranks count from 0)");
}

// The launcher says that the job spans hosts; an absent variable says nothing.
bool spans_hosts(const Family& family, int ranks) {
  const std::optional<std::string> value = variable(family.local);
  if (!value) return false;
  const int count = number(family.local, *value, 1, 1 << 20);
  return family.local_counts_hosts ? count > 1 : count < ranks;
}

void read_store(const Family& family, bool defaults, Identity& identity) {
  const std::optional<std::string> address = variable("MASTER_ADDR");
  const std::optional<std::string> port = variable("MASTER_PORT");
  require(!address || !address->empty(), "environment variable MASTER_ADDR=\"\" names no host");
  if (port) identity.port = number("MASTER_PORT", *port, 1, 65535);
  if (address) identity.address = *address;
  if (identity.ranks == 1) return;
  if (!address) {
    require(defaults, "environment variable MASTER_ADDR is missing although ", family.ranks, "=",
            identity.ranks, ": set it to the host of rank 0 (127.0.0.1 when all ranks are on one host)");
    require(!spans_hosts(family, identity.ranks), "environment variable MASTER_ADDR is missing although ",
            family.launcher, " spreads ", identity.ranks, " ranks over several hosts (", family.local, "=",
            variable(family.local).value_or(""), "): set it to the host of rank 0");
    identity.address = "127.0.0.1";
  }
  if (!port) {
    require(defaults, "environment variable MASTER_PORT is missing although ", family.ranks, "=",
            identity.ranks, ": set it to a free port of ", identity.address);
    identity.port = kDefaultPort;
  }
}

// A job script of sbatch is itself no task of a step, although it has SLURM_PROCID=0: a program started there
// without srun is one process. An interactive allocation (salloc) has SLURM_NTASKS alone.
bool present(const Family& family) {
  const bool rank = variable(family.rank).has_value();
  if (std::string_view(family.launcher) != "Slurm") return rank || variable(family.ranks).has_value();
  return rank && (variable("SLURM_STEP_ID").has_value() || !variable("SLURM_JOB_ID").has_value());
}

}  // namespace

Identity identity_from_environment() {
  Identity identity;
  if (present(kTorchrun)) {
    read_ranks(kTorchrun, identity);
    read_store(kTorchrun, false, identity);
    identity.agent_store = truth("TORCHELASTIC_USE_AGENT_STORE");
    return identity;
  }
  for (const Family& family : kLaunchers) {
    if (!present(family)) continue;
    read_ranks(family, identity);
    read_store(family, true, identity);
    return identity;
  }
  return identity;
}

}  // namespace fsdpp::comm
