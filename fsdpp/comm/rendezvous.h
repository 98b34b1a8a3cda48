#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "fsdpp/comm/connect.h"

namespace fsdpp::comm {

/// Where the processes of a job leave each other notes until they share memory: c10d's TCPStore, reduced to
/// what we need of it. Used by one thread.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  Rendezvous() = default;
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  /// Each of the three throws EnvironmentError when the store is lost or does not answer within the timeout,
  /// and Interrupted when interrupted().
  virtual void set(const std::string& key, const std::string& value) = 0;
  /// The value now, or nothing.
  [[nodiscard]] virtual std::optional<std::string> try_get(const std::string& key) = 0;
  /// Sets `key` unless it has a value; returns the value it then has.
  [[nodiscard]] virtual std::string claim(const std::string& key, const std::string& value) = 0;

  [[nodiscard]] virtual std::string describe() const = 0;  // "the store at 127.0.0.1:29500"
  [[nodiscard]] virtual bool serves() const noexcept = 0;  // the store ends with this object

  /// Waits until `key` has a value; nothing when `timeout` is over first. Throws as above.
  [[nodiscard]] std::optional<std::string> get(const std::string& key, std::chrono::milliseconds timeout);
};

/// Opens the job's store: rank 0 serves it unless an agent does, the others connect to it as soon as it is
/// there. Keys are prefixed with `group`, so that several groups may share one store, and with torchrun's
/// restart count, so that a restarted job does not meet the notes of its predecessor. Throws EnvironmentError
/// naming host and port when the port is taken, the host unknown, or no store answers within `timeout`;
/// Interrupted when interrupted().
[[nodiscard]] std::unique_ptr<Rendezvous> open_rendezvous(const Identity& identity, const std::string& group,
                                                          std::chrono::milliseconds timeout);

/// A store on a free port of 127.0.0.1, for a launcher: its ranks connect with MASTER_ADDR=127.0.0.1,
/// MASTER_PORT=port() and TORCHELASTIC_USE_AGENT_STORE=True. Serves until destroyed.
class StoreServer {
 public:
  StoreServer();  // throws EnvironmentError when no port can be had
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  [[nodiscard]] int port() const noexcept { return port_; }

 private:
  struct Store;
  int port_ = 0;
  std::unique_ptr<Store> store_;
};

}  // namespace fsdpp::comm
