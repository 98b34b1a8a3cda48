#pragma once

namespace fsdpp {

/// Makes SIGINT and SIGTERM set a flag instead of ending the process. Waits for peers look at it and throw
/// Interrupted. A second signal ends the process at once. Call once, in a program's main thread.
void catch_interrupts();

/// True once SIGINT or SIGTERM came (or request_interrupt was called).
[[nodiscard]] bool interrupted() noexcept;

/// Number of the signal that came, 0 when none.
[[nodiscard]] int interrupt_signal() noexcept;

/// Sets or clears the flag by hand, for tests and for programs with signal handling of their own.
void request_interrupt(bool value = true) noexcept;

}  // namespace fsdpp
