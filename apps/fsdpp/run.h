#pragma once

namespace fsdpp::app {

/// The whole program: reads the command line, does what it says, prints errors, returns the exit code.
[[nodiscard]] int run(int argc, char** argv) noexcept;

}  // namespace fsdpp::app
