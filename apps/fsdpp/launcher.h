#pragma once

#include <string>
#include <vector>

namespace fsdpp::app {

/// Starts this program `ranks` times with `arguments` (argv, the program's name first) and looks after the
/// processes until all have ended.
///
/// The first that fails is named on stderr and its exit code returned (128 plus the number for a signal); the
/// others are asked to end and killed after two seconds. SIGINT and SIGTERM are passed on and give 130 and
/// 143. No process outlives the call, or this process. Throws EnvironmentError when the system does not let
/// it.
[[nodiscard]] int launch(int ranks, std::vector<std::string> arguments);

}  // namespace fsdpp::app
