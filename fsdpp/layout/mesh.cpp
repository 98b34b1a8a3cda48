#include "fsdpp/layout/mesh.h"

#include <limits>
#include <stdexcept>
#include <utility>

#include "fsdpp/base/error.h"

namespace fsdpp::layout {
namespace {

std::string describe(std::span<const Axis> axes) {
  std::string out;
  for (const Axis& axis : axes) out += text(out.empty() ? "" : ", ", axis.name, " (", axis.size, ")");
  return out;
}

}  // namespace

Mesh::Mesh(std::vector<Axis> axes) : axes_(std::move(axes)) {
  require(!axes_.empty(), "the mesh has no axes; expected at least one: a single rank is one axis of size 1");
  for (size_t i = 0; i < axes_.size(); ++i) {
    const Axis& axis = axes_[i];
    require(!axis.name.empty(), "axis ", i,
            " of the mesh has no name; expected one that is not empty: name it");
    for (size_t j = 0; j < i; ++j) {
      require(axes_[j].name != axis.name, "axes ", j, " and ", i, " of the mesh are both called '", axis.name,
              "'; expected names that differ: rename one");
    }
    require(axis.size >= 1, "axis '", axis.name, "' of the mesh has the size ", axis.size,
            "; expected 1 or more: leave an axis without ranks out");
    require(ranks_ <= std::numeric_limits<int>::max() / axis.size, "axis '", axis.name,
            "' of the mesh (size ", axis.size, ") takes its ranks beyond ", std::numeric_limits<int>::max(),
            "; expected a product of sizes within int: check the sizes ", describe(axes_));
    ranks_ *= axis.size;
  }
}

std::span<const Axis> Mesh::axes() const noexcept { return axes_; }

int Mesh::ranks() const noexcept { return ranks_; }

int Mesh::axis(const std::string& name) const {
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) return static_cast<int>(i);
  }
  throw UsageError(text("the mesh has no axis '", name, "'; expected one of its axes: ", describe(axes_)));
}

std::vector<int> Mesh::coordinate(int rank) const {
  if (rank < 0 || rank >= ranks_) {
    throw std::out_of_range(text("rank ", rank, " is not in the mesh; expected 0 to ", ranks_ - 1));
  }
  std::vector<int> position(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    position[i] = rank % axes_[i].size;
    rank /= axes_[i].size;
  }
  return position;
}

std::vector<int> Mesh::group(int rank, int axis) const {
  const std::vector<int> position = coordinate(rank);
  if (axis < 0 || axis >= static_cast<int>(axes_.size())) {
    throw std::out_of_range(text("axis ", axis, " is not in the mesh; expected 0 to ", axes_.size() - 1));
  }
  int stride = 1;  // ranks between two neighbours along `axis`
  for (size_t i = static_cast<size_t>(axis) + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  const int first = rank - position[axis] * stride;
  std::vector<int> members;
  members.reserve(axes_[axis].size);
  for (int i = 0; i < axes_[axis].size; ++i) members.push_back(first + i * stride);
  return members;
}

}  // namespace fsdpp::layout
