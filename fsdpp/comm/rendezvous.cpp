#include "fsdpp/comm/rendezvous.h"

#include <c10/util/Exception.h>

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "fsdpp/base/error.h"
#include "fsdpp/base/interrupt.h"
#include "fsdpp/comm/socket.h"
#include "fsdpp/comm/wait_clock.h"

namespace fsdpp::comm {
namespace {

c10d::TCPStoreOptions store_options(int port, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  options.timeout = timeout;
  return options;
}

c10d::TCPStoreOptions server_options(const std::string& host, int port, std::chrono::milliseconds timeout) {
  const int socket = listen_on(host, port);  // c10d takes it over
  c10d::TCPStoreOptions options = store_options(port_of(socket), timeout);
  options.isServer = true;
  options.masterListenFd = socket;
  return options;
}

std::string message_of(const std::exception& error) {
  const auto* const from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 != nullptr ? from_c10->what_without_backtrace() : error.what();
}

/// A TCPStore in a thread of its own. Its calls block for good, deaf to signals and timeouts, while the
/// process that serves it is stopped: the caller must be able to give up, and then leaves the thread behind.
class StoreThread {
 public:
  using Call = std::function<std::optional<std::string>(c10d::Store&)>;

  StoreThread(std::string name, const std::string& host, c10d::TCPStoreOptions options)
      : name_(std::move(name)), timeout_(options.timeout), shared_(std::make_shared<Shared>()) {
    thread_ = std::thread([shared = shared_, host, options] { serve(*shared, host, options); });
  }
  ~StoreThread() {
    bool idle = false;
    {
      const std::lock_guard lock(shared_->mutex);
      shared_->stop = true;
      idle = shared_->idle;
      shared_->changed.notify_all();
    }
    if (idle) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }
  StoreThread(const StoreThread&) = delete;
  StoreThread& operator=(const StoreThread&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }

  std::optional<std::string> run(Call call) {
    std::unique_lock lock(shared_->mutex);
    WaitClock clock(timeout_);
    until_idle(lock, clock);
    shared_->call = std::move(call);
    shared_->idle = false;
    shared_->changed.notify_all();
    until_idle(lock, clock);
    return std::move(shared_->result);
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool idle = false;  // false: opening the store, or in a call
    bool stop = false;
    Call call;
    std::optional<std::string> result;
    std::string error;  // not empty: the store is lost
  };

  // Takes part in `shared` only, never in the StoreThread: that may be gone before a call returns.
  static void serve(Shared& shared, const std::string& host, const c10d::TCPStoreOptions& options) {
    std::unique_lock lock(shared.mutex);
    try {
      lock.unlock();
      const auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
      lock.lock();
      while (!shared.stop) {
        shared.idle = true;
        shared.changed.notify_all();
        shared.changed.wait(lock, [&] { return shared.stop || shared.call != nullptr; });
        if (shared.stop) break;
        const Call call = std::exchange(shared.call, nullptr);
        lock.unlock();
        std::optional<std::string> result = call(*store);
        lock.lock();
        shared.result = std::move(result);
      }
      lock.unlock();  // the store's own end may take a while
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      shared.error = message_of(error);
      shared.idle = true;
      shared.changed.notify_all();
    }
  }

  void until_idle(std::unique_lock<std::mutex>& lock, WaitClock& clock) const {
    while (!shared_->idle) {
      if (interrupted()) throw Interrupted("asked to stop while waiting for " + name_);
      if (!clock.running()) {
        throw EnvironmentError(
            text(name_, " accepts connections but does not answer within ", timeout_.count(),
                 " ms: its process is stopped, or MASTER_PORT belongs to another program"),
            true);
      }
      shared_->changed.wait_for(lock, clock.slice());
    }
    if (!shared_->error.empty()) throw EnvironmentError(text(name_, " is lost: ", shared_->error), true);
  }

  std::string name_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

class TcpRendezvous final : public Rendezvous {
 public:
  TcpRendezvous(const std::string& name, const std::string& host, const c10d::TCPStoreOptions& options,
                std::string prefix)
      : prefix_(std::move(prefix)), serves_(options.isServer), store_(name, host, options) {}

  void set(const std::string& key, const std::string& value) override {
    store_.run([key = prefix_ + key, value](c10d::Store& store) {
      store.set(key, value);
      return std::optional<std::string>();
    });
  }
  std::optional<std::string> try_get(const std::string& key) override {
    return store_.run([key = prefix_ + key](c10d::Store& store) {
      return store.check({key}) ? std::optional<std::string>(store.get_to_str(key)) : std::nullopt;
    });
  }
  std::string claim(const std::string& key, const std::string& value) override {
    const auto held = store_.run([key = prefix_ + key, value](c10d::Store& store) {
      return std::optional<std::string>(store.compareSet(key, std::string(), value));
    });
    return held.value_or("");
  }
  std::string describe() const override { return store_.name(); }
  bool serves() const noexcept override { return serves_; }

 private:
  std::string prefix_;
  bool serves_;
  StoreThread store_;
};

}  // namespace

std::optional<std::string> Rendezvous::get(const std::string& key, std::chrono::milliseconds timeout) {
  WaitClock clock(timeout);
  // Not the store's own blocking get, which no signal ends: asked again in growing steps.
  for (std::chrono::microseconds step(200);; step = std::min(2 * step, std::chrono::microseconds(20000))) {
    if (std::optional<std::string> value = try_get(key)) return value;
    if (interrupted()) throw Interrupted("asked to stop while waiting for \"" + key + "\" in " + describe());
    if (!clock.running()) return std::nullopt;
    std::this_thread::sleep_for(step);
  }
}

std::unique_ptr<Rendezvous> open_rendezvous(const Identity& identity, const std::string& group,
                                            std::chrono::milliseconds timeout) {
  const char* const restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  const std::string prefix = text("fsdpp/", restarts != nullptr ? restarts : "0", "/", group, "/");
  const std::string name = text("the store at ", identity.address, ":", identity.port);
  if (identity.rank == 0 && !identity.agent_store) {
    return std::make_unique<TcpRendezvous>(name, identity.address,
                                           server_options(identity.address, identity.port, timeout), prefix);
  }
  await_listener(identity.address, identity.port, timeout);
  return std::make_unique<TcpRendezvous>(name, identity.address, store_options(identity.port, timeout),
                                         prefix);
}

struct StoreServer::Store {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

StoreServer::StoreServer() {
  try {
    const c10d::TCPStoreOptions options = server_options("127.0.0.1", 0, std::chrono::seconds(30));
    port_ = options.port;
    store_ = std::make_unique<Store>(Store{c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)});
  } catch (const c10::Error& error) {
    throw EnvironmentError(text("cannot start a store on 127.0.0.1: ", error.what_without_backtrace()));
  }
}

StoreServer::~StoreServer() = default;

}  // namespace fsdpp::comm
