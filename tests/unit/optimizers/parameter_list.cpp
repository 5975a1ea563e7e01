// Whether the parameters that an optimizer lists are still the same.
#include "support/catch.h"

#include <pacer/optimizers/detail/parameter_list.h>

#include "support/optimizers/optimizers.h"

namespace pacer::testing {

TEST_CASE("a list of parameters is the same while order, number, groups and needs are", "[lifecycle]") {
  const Tensor a = torch::ones({2}).requires_grad_(), b = torch::ones({2}).requires_grad_();
  const Tensor c = torch::ones({2});
  const auto groups_of = [](const std::vector<std::vector<Tensor>>& lists) {
    detail::ParamGroups groups;
    for (const std::vector<Tensor>& list : lists) groups.emplace_back(list);
    return groups;
  };
  struct Item {
    detail::SeenParameter parameter;
    size_t group;
  };
  const std::vector<Item> seen = {
      {detail::SeenParameter(a), 0}, {detail::SeenParameter(b), 0}, {detail::SeenParameter(c), 1}};
  const auto is_same = [&](const std::vector<std::vector<Tensor>>& lists) {
    return detail::is_list(seen, groups_of(lists), [](const Item& item, const Tensor& now, size_t group) {
      return item.parameter.is(now) && item.group == group;
    });
  };
  CHECK(is_same({{a, b}, {c}}));
  CHECK_FALSE(is_same({{b, a}, {c}}));
  CHECK_FALSE(is_same({{a, b}}));
  CHECK_FALSE(is_same({{a, b}, {c, a.detach()}}));
  CHECK_FALSE(is_same({{a}, {b, c}}));
  CHECK_FALSE(is_same({{a, torch::ones({2}).requires_grad_()}, {c}}));
  CHECK(detail::same_tensors(detail::trained_parameters(groups_of({{a, c}, {b}})), {a, b}));
  CHECK(detail::are_trained({a, b}, groups_of({{a, c}, {b}})));
  CHECK_FALSE(detail::are_trained({b, a}, groups_of({{a, c}, {b}})));
  CHECK_FALSE(detail::are_trained({a}, groups_of({{a, c}, {b}})));
  CHECK_FALSE(detail::are_trained({a, b, c}, groups_of({{a, c}, {b}})));
  CHECK_FALSE(detail::same_tensors({a, b}, {b, a}));
  CHECK_FALSE(detail::same_tensors({a, b}, {a}));
  b.requires_grad_(false);
  CHECK_FALSE(is_same({{a, b}, {c}}));
  CHECK(detail::same_tensors(detail::trained_parameters(groups_of({{a, b}, {c}})), {a}));
  CHECK(detail::are_trained({a}, groups_of({{a, b}, {c}})));
}

}  // namespace pacer::testing
