// Who a process is, read from the variables of each launcher.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"

namespace fsdpp::comm {
namespace {

constexpr const char* kAll[] = {"RANK",
                                "WORLD_SIZE",
                                "LOCAL_WORLD_SIZE",
                                "MASTER_ADDR",
                                "MASTER_PORT",
                                "TORCHELASTIC_USE_AGENT_STORE",
                                "OMPI_COMM_WORLD_RANK",
                                "OMPI_COMM_WORLD_SIZE",
                                "OMPI_COMM_WORLD_LOCAL_SIZE",
                                "PMI_RANK",
                                "PMI_SIZE",
                                "MPI_LOCALNRANKS",
                                "SLURM_PROCID",
                                "SLURM_NTASKS",
                                "SLURM_NNODES",
                                "SLURM_STEP_ID",
                                "SLURM_JOB_ID"};

using Variables = std::map<std::string, std::string>;

// The identity when exactly `variables` of all that count are set.
Identity identity_with(const Variables& variables) {
  Variables before;
  for (const char* name : kAll) {
    if (const char* const value = std::getenv(name)) before[name] = value;
    unsetenv(name);
  }
  struct Restore {
    const Variables& before;
    ~Restore() {
      for (const char* name : kAll) unsetenv(name);
      for (const auto& [name, value] : before) setenv(name.c_str(), value.c_str(), 1);
    }
  } restore{before};
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  return identity_from_environment();
}

void expect(const Variables& variables, int rank, int ranks, const std::string& address, int port,
            bool agent) {
  const Identity identity = identity_with(variables);
  EXPECT_EQ(identity.rank, rank);
  EXPECT_EQ(identity.ranks, ranks);
  EXPECT_EQ(identity.address, address);
  EXPECT_EQ(identity.port, port);
  EXPECT_EQ(identity.agent_store, agent);
}

void expect_refused(const Variables& variables, const std::string& part) {
  try {
    const Identity identity = identity_with(variables);
    ADD_FAILURE() << "taken as rank " << identity.rank << " of " << identity.ranks << ", expected: " << part;
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
        << "no \"" << part << "\" in " << error.what();
  }
}

Variables operator+(Variables a, const Variables& b) {
  for (const auto& [name, value] : b) a[name] = value;
  return a;
}

const Variables kTorchrun = {
    {"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "host7"}, {"MASTER_PORT", "1234"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
const Variables kMpich = {{"PMI_RANK", "0"}, {"PMI_SIZE", "3"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "6"}};

TEST(Identity, WithoutALauncherThereIsOneRank) {
  expect({}, 0, 1, "", 0, false);
  expect({{"MASTER_ADDR", "host7"}, {"MASTER_PORT", "nonsense"}}, 0, 1, "", 0,
         false);  // nobody asks for a store
}

TEST(Identity, Torchrun) {
  expect(kTorchrun, 2, 4, "host7", 1234, false);
  expect(kTorchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "True"}}, 2, 4, "host7", 1234, true);
  expect(kTorchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}}, 2, 4, "host7", 1234, false);
  expect({{"RANK", "0"}, {"WORLD_SIZE", "1"}}, 0, 1, "", 0, false);
  expect(kTorchrun + kOpenMpi + kSlurm, 2, 4, "host7", 1234,
         false);  // a launcher inside another: the inner one
}

TEST(Identity, MpiAndSlurmHaveDefaultsOnOneHost) {
  const Variables store = {{"MASTER_ADDR", "host7"}, {"MASTER_PORT", "1234"}};
  expect(kOpenMpi, 1, 2, "127.0.0.1", 29500, false);
  expect(kOpenMpi + store, 1, 2, "host7", 1234, false);
  expect(kOpenMpi + Variables{{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}, 1, 2, "127.0.0.1", 29500, false);
  expect(kMpich, 0, 3, "127.0.0.1", 29500, false);
  expect(kMpich + store, 0, 3, "host7", 1234, false);
  expect(kSlurm, 5, 6, "127.0.0.1", 29500, false);
  expect(kSlurm + Variables{{"SLURM_NNODES", "1"}, {"MASTER_PORT", "99"}}, 5, 6, "127.0.0.1", 99, false);
  expect(kOpenMpi + kSlurm, 1, 2, "127.0.0.1", 29500, false);  // mpirun inside a Slurm job
  expect({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, 0, 1, "", 0, false);
}

TEST(Identity, SlurmsJobScriptAndAllocationAreNoTasks) {
  const Variables script = {{"SLURM_JOB_ID", "77"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}};
  expect(script, 0, 1, "", 0, false);
  expect({{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "4"}}, 0, 1, "", 0, false);
  expect(script + Variables{{"SLURM_STEP_ID", "0"}}, 0, 4, "127.0.0.1", 29500, false);
}

TEST(Identity, SeveralHostsNeedAnAddress) {
  expect_refused(kOpenMpi + Variables{{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}, "MASTER_ADDR is missing");
  expect_refused(kMpich + Variables{{"MPI_LOCALNRANKS", "2"}}, "MASTER_ADDR is missing");
  expect_refused(kSlurm + Variables{{"SLURM_NNODES", "2"}}, "MASTER_ADDR is missing");
}

TEST(Identity, MissingVariablesAreNamed) {
  for (const auto& [name, value] : kTorchrun) {
    Variables some = kTorchrun;
    some.erase(name);
    expect_refused(some, name + " is missing");
  }
  expect_refused({{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is missing");
  expect_refused({{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK is missing");
  expect_refused({{"PMI_RANK", "0"}}, "PMI_SIZE is missing");
  expect_refused({{"PMI_SIZE", "2"}}, "PMI_RANK is missing");
  expect_refused({{"SLURM_PROCID", "0"}}, "SLURM_NTASKS is missing");
}

TEST(Identity, MalformedAndContradictoryValuesAreQuoted) {
  for (const char* bad : {"", " ", "-1", "two", "1x", "1.0", "0x1", " 1", "99999999999"}) {
    const std::string quoted = "=\"" + std::string(bad) + "\"";
    expect_refused(kTorchrun + Variables{{"RANK", bad}}, "RANK" + quoted);
    expect_refused(kTorchrun + Variables{{"WORLD_SIZE", bad}}, "WORLD_SIZE" + quoted);
    expect_refused(kTorchrun + Variables{{"MASTER_PORT", bad}}, "MASTER_PORT" + quoted);
    expect_refused(kOpenMpi + Variables{{"OMPI_COMM_WORLD_RANK", bad}}, "OMPI_COMM_WORLD_RANK" + quoted);
    expect_refused(kOpenMpi + Variables{{"OMPI_COMM_WORLD_SIZE", bad}}, "OMPI_COMM_WORLD_SIZE" + quoted);
    expect_refused(kMpich + Variables{{"PMI_RANK", bad}}, "PMI_RANK" + quoted);
    expect_refused(kMpich + Variables{{"PMI_SIZE", bad}}, "PMI_SIZE" + quoted);
    expect_refused(kSlurm + Variables{{"SLURM_PROCID", bad}}, "SLURM_PROCID" + quoted);
    expect_refused(kSlurm + Variables{{"SLURM_NTASKS", bad}}, "SLURM_NTASKS" + quoted);
  }
  expect_refused(kTorchrun + Variables{{"WORLD_SIZE", "0"}}, "WORLD_SIZE=\"0\"");
  expect_refused(kTorchrun + Variables{{"MASTER_PORT", "0"}}, "MASTER_PORT=\"0\"");
  expect_refused(kTorchrun + Variables{{"MASTER_PORT", "65536"}}, "MASTER_PORT=\"65536\"");
  expect_refused(kTorchrun + Variables{{"MASTER_ADDR", ""}}, "MASTER_ADDR=\"\"");
  expect_refused(kTorchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "maybe"}}, "=\"maybe\"");
  expect_refused(kTorchrun + Variables{{"RANK", "4"}}, "RANK=4 but WORLD_SIZE=4");
  expect_refused(kOpenMpi + Variables{{"OMPI_COMM_WORLD_RANK", "2"}}, "OMPI_COMM_WORLD_RANK=2");
  expect_refused(kMpich + Variables{{"PMI_RANK", "3"}}, "PMI_RANK=3");
  expect_refused(kSlurm + Variables{{"SLURM_PROCID", "6"}}, "SLURM_PROCID=6");
}

}  // namespace
}  // namespace fsdpp::comm
