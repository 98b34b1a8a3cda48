#include "tests/gpu/gpu_ranks.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "fsdpp/base/error.h"
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/cuda.h"
#include "fsdpp/device/cuda.h"

namespace fsdpp::test {
namespace {

constexpr std::chrono::minutes kLimit(4);
constexpr int kWrong = 3;
constexpr int kSharedRanks = 2;

comm::CudaVia via() {
  const char* name = std::getenv("FSDPP_TEST_VIA");
  if (name == nullptr) return comm::CudaVia::automatic;
  return std::string(name) == "nccl" ? comm::CudaVia::nccl : comm::CudaVia::peers;
}

int run_body(const std::string& name) {
  try {
    const auto group = comm::connect(std::chrono::seconds(30));
    const int gpus = device::cuda_devices();
    comm::use_cuda_lanes(*group, group->rank() % gpus, {.via = via(), .share_gpus = group->ranks() > gpus});
    const bool right = gpu_bodies().at(name)(*group);
    group->barrier();
    return right && !testing::Test::HasFailure() ? 0 : kWrong;
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
  }
  return 1;
}

}  // namespace

std::map<std::string, GpuBody>& gpu_bodies() {
  static std::map<std::string, GpuBody> bodies;
  return bodies;
}

std::string no_gpus_for(int ranks, const std::string& via) {
  const int gpus = device::cuda_devices();
  if (gpus >= ranks) return {};
  if (gpus == 0 || via == "nccl") return text("needs ", ranks, ranks == 1 ? " GPU" : " GPUs");
  const char* given = std::getenv("FSDPP_TEST_SHARED_RANKS");
  if (ranks <= (given != nullptr ? std::atoi(given) : kSharedRanks)) return {};
  return text("needs ", ranks, " GPUs, or FSDPP_TEST_SHARED_RANKS=", ranks, " to share them: slow");
}

std::string run_on_gpus(const std::string& name, int ranks, const Variables& variables) {
  std::vector<RankProcess> processes = start_ranks(name, ranks, free_port(), variables);
  for (RankProcess& process : processes) {
    EXPECT_EQ(process.wait(kLimit), 0) << process.output();
  }
  return processes.front().output();
}

void record_figure(const std::string& name, const std::string& printed, const std::string& words) {
  int sum = 0;
  for (std::size_t at = printed.find(words); at != std::string::npos; at = printed.find(words, at + 1))
    sum += std::atoi(printed.c_str() + at + words.size());
  testing::Test::RecordProperty(name, sum);
  std::cout << printed;
}

int gpu_main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const char* const body = std::getenv("FSDPP_TEST_BODY")) return run_body(body);
  return RUN_ALL_TESTS();
}

}  // namespace fsdpp::test
