#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::pipeline {

/// Carries activations and their gradients between the stages of one pipeline, which are threads here.
class Mailbox {
 public:
  enum class What { activation, gradient };

  /// `chunk`: the model's chunk that takes the tensor.
  void send(What what, int chunk, int microbatch, at::Tensor tensor) {
    const std::lock_guard lock(mutex_);
    letters_[{what, chunk, microbatch}] = std::move(tensor);
    arrived_.notify_all();
  }

  /// Waits for it. Throws EnvironmentError when nothing comes: another stage has failed.
  [[nodiscard]] at::Tensor receive(What what, int chunk, int microbatch) {
    constexpr std::chrono::seconds kPatience(30);
    std::unique_lock lock(mutex_);
    const std::tuple key{what, chunk, microbatch};
    const bool came = arrived_.wait_for(lock, kPatience, [&] { return letters_.count(key) > 0; });
    if (!came) {
      throw EnvironmentError(text("pipeline: nothing came for chunk ", chunk, ", microbatch ", microbatch,
                                  " within 30 s: another stage has stopped; see its error"));
    }
    at::Tensor tensor = std::move(letters_[key]);
    letters_.erase(key);
    return tensor;
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<std::tuple<What, int, int>, at::Tensor> letters_;
};

}  // namespace fsdpp::pipeline
