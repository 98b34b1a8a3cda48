#include "fsdpp/base/error.h"

#include <cstdio>
#include <cstdlib>

namespace fsdpp {

void broken_invariant(std::string_view expression, std::string_view file, int line,
                      const std::string& message) {
  std::fprintf(stderr, "fsdpp: broken invariant `%.*s` at %.*s:%d: %s\n", static_cast<int>(expression.size()),
               expression.data(), static_cast<int>(file.size()), file.data(), line, message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace fsdpp
