#pragma once

#include <string>
#include <vector>

#include "apps/fsdpp/config.h"
#include "apps/fsdpp/device_choice.h"

namespace fsdpp::app {

/// What the command line asks for.
struct Arguments {
  std::string answer;  // text to print (--help, --version); when not empty nothing else is asked for
  std::string config_path = {};                   // --config, empty: none
  int ranks = 0;                                  // --ranks, 0: not given
  DeviceChoice device = DeviceChoice::automatic;  // --device
  std::vector<Override> overrides = {};
};

/// Throws UsageError with one line that names what is wrong with the command line and the remedy.
[[nodiscard]] Arguments parse_arguments(int argc, const char* const* argv);

}  // namespace fsdpp::app
