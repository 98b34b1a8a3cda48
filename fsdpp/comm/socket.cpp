#include "fsdpp/comm/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/wait_clock.h"

namespace fsdpp::comm {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

Addresses resolve(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | flags;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw EnvironmentError(text("the address \"", host, "\" of the store (MASTER_ADDR) cannot be resolved: ",
                                gai_strerror(error), "; set MASTER_ADDR to the host of rank 0"));
  }
  return {found, &freeaddrinfo};
}

bool is_loopback(const addrinfo& address) {
  if (address.ai_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(address.ai_addr)->sin_addr.s_addr) >> 24 == 127;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr) != 0;
}

// A listening socket, or -1 with errno set.
int try_listen(const addrinfo& address) {
  Descriptor fd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (fd.get() < 0) return -1;
  const int on = 1;
  const int off = 0;
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(fd.get(), address.ai_addr, address.ai_addrlen) != 0 || listen(fd.get(), SOMAXCONN) != 0) return -1;
  return fd.release();
}

// 0, or why no connection came about within `most`.
int try_connect(const addrinfo& address, std::chrono::milliseconds most) {
  const Descriptor fd(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd.get() < 0) return errno;
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd ready{fd.get(), POLLOUT, 0};
  const int count = poll(&ready, 1, static_cast<int>(most.count()));
  if (count <= 0) return count == 0 ? ETIMEDOUT : errno;
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

int listen_on(const std::string& host, int port) {
  const Addresses wanted = resolve(host, port, 0);
  const bool local = is_loopback(*wanted);
  const Addresses all = local ? Addresses(nullptr, &freeaddrinfo) : resolve("", port, AI_PASSIVE);
  int error = EADDRNOTAVAIL;
  // IPv6 first: it takes IPv4 connections too.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* address = local ? wanted.get() : all.get(); address != nullptr;
         address = address->ai_next) {
      if (address->ai_family != family || (local && address->ai_family != wanted->ai_family)) continue;
      const int fd = try_listen(*address);
      if (fd >= 0) return fd;
      error = errno;
      if (error == EADDRINUSE) break;
    }
  }
  throw EnvironmentError(
      text("rank 0 cannot serve the store at ", host, ":", port, ": ", std::strerror(error),
           error == EADDRINUSE ? "; another job uses this port: set MASTER_PORT to a free one"
                               : "; set MASTER_ADDR to this host and MASTER_PORT to a free port"),
      error == EADDRINUSE);
}

int port_of(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

void await_listener(const std::string& host, int port, std::chrono::milliseconds timeout) {
  const Addresses addresses = resolve(host, port, 0);
  WaitClock clock(timeout);
  int error = ETIMEDOUT;
  while (clock.running()) {
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      error = try_connect(*address, std::chrono::milliseconds(100));
      if (error == 0) return;
      if (interrupted())
        throw Interrupted(text("asked to stop while connecting to the store at ", host, ":", port));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw EnvironmentError(
      text("no store answers at ", host, ":", port, " within ", timeout.count(), " ms (",
           std::strerror(error),
           "): rank 0 serves it; check that rank 0 runs and that MASTER_ADDR and MASTER_PORT are "
           "the same for all ranks"),
      true);
}

}  // namespace fsdpp::comm
