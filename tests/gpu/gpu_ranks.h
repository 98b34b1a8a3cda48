#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "fsdpp/comm/peer_group.h"
#include "tests/dist/rank_process.h"

namespace fsdpp::test {

/// What a rank process does: throws, or returns false, when something is wrong. The group has the lanes of
/// its GPU, which ranks share where there are fewer GPUs.
using GpuBody = std::function<bool(comm::PeerGroup& group)>;

/// The bodies of a test program, by name.
[[nodiscard]] std::map<std::string, GpuBody>& gpu_bodies();

struct RegisterGpuBody {
  RegisterGpuBody(const std::string& name, GpuBody body) { gpu_bodies()[name] = std::move(body); }
};

/// Why `ranks` ranks that reach each other `via` peers or nccl are not run here, empty when they are: where
/// there are fewer GPUs peers share them, up to $FSDPP_TEST_SHARED_RANKS ranks (2); NCCL wants one for each.
[[nodiscard]] std::string no_gpus_for(int ranks, const std::string& via = "peers");

/// Runs body `name` on `ranks` processes; fails the test with their output unless all return true in time.
/// `variables` reach the bodies; FSDPP_TEST_VIA = peers or nccl says how the GPUs reach each other. Returns
/// what rank 0 printed.
std::string run_on_gpus(const std::string& name, int ranks, const Variables& variables = {});

/// Records, as figure `name` of the running test, the sum of the numbers that stand behind `words` in
/// `printed`, and shows what was printed.
void record_figure(const std::string& name, const std::string& printed, const std::string& words);

/// Main of a test program: the body that $FSDPP_TEST_BODY names, or all tests.
int gpu_main(int argc, char** argv);

}  // namespace fsdpp::test
