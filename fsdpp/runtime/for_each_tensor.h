#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdpp {

// Calls `visit` for each tensor in a module's output. For a type of your own, overload it in that type's
// namespace:
//   template <class Visit> void for_each_tensor(const MyOutput& output, Visit&& visit);

template <class Visit>
void for_each_tensor(const at::Tensor& tensor, Visit&& visit) {
  visit(tensor);
}

template <class T, class Visit>
  requires std::is_arithmetic_v<T>
void for_each_tensor(const T&, Visit&&) {}

template <class Visit>
void for_each_tensor(const std::string&, Visit&&) {}

template <class T, class Visit>
void for_each_tensor(const std::optional<T>& value, Visit&& visit);
template <class T, class A, class Visit>
void for_each_tensor(const std::vector<T, A>& values, Visit&& visit);
template <class T, std::size_t N, class Visit>
void for_each_tensor(const std::array<T, N>& values, Visit&& visit);
template <class A, class B, class Visit>
void for_each_tensor(const std::pair<A, B>& values, Visit&& visit);
template <class... T, class Visit>
void for_each_tensor(const std::tuple<T...>& values, Visit&& visit);
template <class K, class T, class C, class A, class Visit>
void for_each_tensor(const std::map<K, T, C, A>& values, Visit&& visit);
template <class K, class T, class H, class E, class A, class Visit>
void for_each_tensor(const std::unordered_map<K, T, H, E, A>& values, Visit&& visit);

template <class T, class Visit>
void for_each_tensor(const std::optional<T>& value, Visit&& visit) {
  if (value) for_each_tensor(*value, visit);
}
template <class T, class A, class Visit>
void for_each_tensor(const std::vector<T, A>& values, Visit&& visit) {
  for (const auto& value : values) for_each_tensor(value, visit);
}
template <class T, std::size_t N, class Visit>
void for_each_tensor(const std::array<T, N>& values, Visit&& visit) {
  for (const auto& value : values) for_each_tensor(value, visit);
}
template <class A, class B, class Visit>
void for_each_tensor(const std::pair<A, B>& values, Visit&& visit) {
  for_each_tensor(values.first, visit);
  for_each_tensor(values.second, visit);
}
template <class... T, class Visit>
void for_each_tensor(const std::tuple<T...>& values, Visit&& visit) {
  std::apply([&](const auto&... value) { (for_each_tensor(value, visit), ...); }, values);
}
template <class K, class T, class C, class A, class Visit>
void for_each_tensor(const std::map<K, T, C, A>& values, Visit&& visit) {
  for (const auto& entry : values) for_each_tensor(entry.second, visit);
}
template <class K, class T, class H, class E, class A, class Visit>
void for_each_tensor(const std::unordered_map<K, T, H, E, A>& values, Visit&& visit) {
  for (const auto& entry : values) for_each_tensor(entry.second, visit);
}

}  // namespace fsdpp
