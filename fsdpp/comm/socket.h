#pragma once

#include <chrono>
#include <string>

namespace fsdpp::comm {

/// A TCP socket that listens on `port` (0: any free one): on the loopback interface when `host` is a loopback
/// address, else on all interfaces. The caller owns the descriptor.
/// Throws EnvironmentError naming host and port when the host is unknown or the port is taken.
[[nodiscard]] int listen_on(const std::string& host, int port);

/// The port a listening socket has.
[[nodiscard]] int port_of(int socket);

/// Returns once something accepts connections at host:port. c10d's own client needs up to 9 s to notice that
/// nobody listens yet, and does not stop for a signal meanwhile. Throws EnvironmentError naming host, port
/// and the last failure once `timeout` is over, Interrupted when interrupted().
void await_listener(const std::string& host, int port, std::chrono::milliseconds timeout);

}  // namespace fsdpp::comm
