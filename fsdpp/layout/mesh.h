#pragma once

#include <span>
#include <string>
#include <vector>

namespace fsdpp::layout {

/// One dimension of a mesh.
struct Axis {
  std::string name;  // not empty, unique in its mesh
  int size = 1;      // ranks along it, >= 1
};

/// An n-d arrangement of ranks 0 .. ranks()-1 in row-major order: the last axis is the fastest.
class Mesh {
 public:
  /// Throws UsageError, naming the axis, for no axes, an empty or repeated name, a size below 1, or a product
  /// beyond int.
  explicit Mesh(std::vector<Axis> axes);

  [[nodiscard]] std::span<const Axis> axes() const noexcept;
  [[nodiscard]] int ranks() const noexcept;
  /// Index of the axis called `name`. Throws UsageError that lists the axes there are.
  [[nodiscard]] int axis(const std::string& name) const;
  /// Position of `rank` along each axis. Throws std::out_of_range unless 0 <= rank < ranks().
  [[nodiscard]] std::vector<int> coordinate(int rank) const;
  /// The ranks that differ from `rank` along `axis` alone, itself included, in order of their position.
  /// Throws std::out_of_range for an unknown rank or axis.
  [[nodiscard]] std::vector<int> group(int rank, int axis) const;

 private:
  std::vector<Axis> axes_;
  int ranks_ = 1;
};

}  // namespace fsdpp::layout
