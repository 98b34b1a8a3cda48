#include "apps/fsdpp/device_choice.h"

#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "apps/fsdpp/place.h"
#include "fsdpp/base/error.h"

namespace fsdpp::app {
namespace {

namespace fs = std::filesystem;

std::string name_of(DeviceChoice wanted) {
  return wanted == DeviceChoice::cuda ? "--device cuda" : "--device cuda-shared";
}

/// NVIDIA's driver shows its GPUs here; to look loads nothing of CUDA. A container may show GPUs that it does
/// not lend: fsdpp-cuda asks the driver.
bool machine_shows_gpu() {
  std::error_code error;
  if (fs::exists("/dev/nvidia0", error)) return true;
  return fs::directory_iterator("/proc/driver/nvidia/gpus", error) != fs::directory_iterator();
}

/// The program for GPUs, beside this one wherever it is called from.
fs::path gpu_program() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path() / "fsdpp-cuda";
}

Place hand_over(DeviceChoice wanted, const std::vector<std::string>& command) {
  const bool shown = machine_shows_gpu();
  if (wanted == DeviceChoice::automatic && !shown) return {};
  const fs::path program = gpu_program();
  if (access(program.c_str(), X_OK) != 0) {
    const std::string missing = text("this program computes on CPUs alone, and there is no ",
                                     program.string(), " to go on in its place");
    require(wanted == DeviceChoice::automatic, name_of(wanted), ": ", missing,
            shown ? "" : " (nor does this machine show an NVIDIA GPU)",
            "; build it where there are a CUDA toolkit and a torch with CUDA, or give --device cpu");
    return {.note = text("there is a GPU, but ", missing)};
  }
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execv(program.c_str(), arguments.data());
  throw EnvironmentError(text("cannot start ", program.string(), ": ", std::strerror(errno),
                              "; build it again, or give --device cpu"));
}

}  // namespace

Place choose_place(DeviceChoice wanted, const comm::Identity& identity, int ranks,
                   const std::vector<std::string>& command) {
  if (wanted == DeviceChoice::cpu) return {};
  if (!built_for_gpus()) return hand_over(wanted, command);
  const int gpus = gpu_count();
  if (gpus == 0) {
    require(wanted == DeviceChoice::automatic, name_of(wanted),
            ": there is no GPU that this process can use; look at nvidia-smi and at "
            "CUDA_VISIBLE_DEVICES, or give --device cpu");
    return {.note = "there is no GPU that this process can use"};
  }
  // Under another launcher each rank may see its own GPU alone.
  const bool shared = wanted == DeviceChoice::cuda_shared && ranks > gpus;
  require(shared || ranks == identity.ranks || ranks <= gpus, "--ranks ", ranks, ": this process can use ",
          gpus, gpus == 1 ? " GPU" : " GPUs", ", and each rank needs one of its own; give --ranks ", gpus,
          ", or --device cpu, or --device cuda-shared (ranks take turns on a GPU: slow)");
  return {.gpu = 0, .shared = shared};
}

int gpu_of(const comm::Identity& identity, bool shared) {
  const int gpus = gpu_count();
  if (gpus == 1) return 0;  // some launchers show each rank its own GPU alone
  int gpu = identity.rank;
  if (const char* given = std::getenv("LOCAL_RANK")) {
    const std::string_view digits(given);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), gpu);
    require(error == std::errc() && end == digits.data() + digits.size() && gpu >= 0, "LOCAL_RANK = \"",
            given,
            "\": expected a whole number from 0, the number of this rank on its host; correct it or leave it "
            "out");
  }
  if (shared) return gpu % gpus;
  require(gpu < gpus, "rank ", identity.rank, " would compute on GPU ", gpu, ", but this process can use ",
          gpus, " of them, and each rank needs one of its own; start at most ", gpus,
          " ranks, or give --device cpu, or --device cuda-shared (ranks take turns on a GPU: slow)");
  return gpu;
}

}  // namespace fsdpp::app
