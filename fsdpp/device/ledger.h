#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace fsdpp::device {

/// Bytes of one rank's runtime by purpose ("published weights", "gradient slots"), now and at the worst
/// moment.
class Ledger {
 public:
  void add(const std::string& purpose, int64_t bytes);
  /// Aborts when more is taken back than was added: memory that is given back cannot raise an error.
  void remove(const std::string& purpose, int64_t bytes) noexcept;

  [[nodiscard]] int64_t current() const noexcept { return current_; }  // bytes
  [[nodiscard]] int64_t peak() const noexcept { return peak_; }        // bytes
  [[nodiscard]] const std::map<std::string, int64_t>& by_purpose() const noexcept { return by_purpose_; }

 private:
  std::map<std::string, int64_t> by_purpose_;
  int64_t current_ = 0;
  int64_t peak_ = 0;
};

}  // namespace fsdpp::device
