#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "apps/fsdpp/config.h"

namespace fsdpp::app {

/// Where a value lives in a Config: its kind is the kind of the variable.
using Slot = std::variant<int64_t*, double*, bool*, std::string*>;
/// A value as a file gives it.
using Scalar = std::variant<int64_t, double, bool, std::string>;

/// What a value may be, apart from its kind.
struct Check {
  double minimum = 0;
  double maximum = 0;                          // minimum == maximum: no bounds
  bool above_minimum = false;                  // the minimum itself is not allowed
  bool below_maximum = false;                  // nor the maximum
  std::vector<std::string_view> choices = {};  // for texts; empty: any
  bool plain = false;                          // a text that a file may also give as a number or a truth
};

/// One value of the configuration: this row is all that file, command line, help and messages know of it.
struct Entry {
  std::string_view key;  // "section.name"
  Slot (*slot)(Config&);
  Check check;
  std::string_view help;
};

/// Every value, section by section.
[[nodiscard]] std::span<const Entry> entries();

/// The row of `key`, nullptr when there is none.
[[nodiscard]] const Entry* find_entry(std::string_view key);

/// "a whole number from 1 to 4096", "true or false", "one of optim_grads_params, no_shard", ...
[[nodiscard]] std::string expected(const Entry& entry);

/// The default as one would write it on the command line ("" for an empty text).
[[nodiscard]] std::string default_text(const Entry& entry);

/// Stores `value` of kind and range as the row demands; a whole number is a number too.
/// Throws UsageError "WHERE: KEY = VALUE: expected ...; write for example ...".
void assign(Config& config, const Entry& entry, const Scalar& value, const std::string& where);

/// The same for a value written on the command line.
void assign_text(Config& config, const Entry& entry, const std::string& value);

/// Of `names` the one most like `word`, "" when none is near.
[[nodiscard]] std::string nearest(std::string_view word, const std::vector<std::string>& names);

/// "; did you mean X?" or, when nothing is near, "; see `fsdpp train --help`".
[[nodiscard]] std::string suggestion(std::string_view word, const std::vector<std::string>& names);

/// All keys, and all sections, of the table.
[[nodiscard]] std::vector<std::string> keys();
[[nodiscard]] std::vector<std::string> sections();

}  // namespace fsdpp::app
