#pragma once

namespace fsdpp::app {

// What the program's exit code says. A signal that ended it: 128 plus its number, as shells say it.
inline constexpr int kFailed = 1;    // anything that is not below
inline constexpr int kBadUsage = 2;  // command line or configuration
inline constexpr int kLostPeer = 3;  // another rank is gone or silent: the consequence of that rank's trouble
inline constexpr int kSignalBase = 128;

}  // namespace fsdpp::app
