#include <pacer/modules/detail/product_nodes.h>

#include <string>
#include <unordered_set>

#include <torch/csrc/autograd/generated/Functions.h>

namespace pacer::detail {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;

// Each operand is saved for the gradient of the other. `first`: the place of the left one's edge.
void release_unused(const Node& node, size_t first, SavedVariable& left, SavedVariable& right) {
  if (!node.next_edge(first).is_valid()) right = SavedVariable();
  if (!node.next_edge(first + 1).is_valid()) left = SavedVariable();
}

}  // namespace

bool is_product(const Node& node) {
  static const std::unordered_set<std::string> names = {"AddbmmBackward0",
                                                        "AddmmBackward0",
                                                        "AddmvBackward0",
                                                        "BaddbmmBackward0",
                                                        "BmmBackward0",
                                                        "ConvolutionBackward0",
                                                        "ConvolutionBackward1",
                                                        "ConvolutionOverrideableBackward0",
                                                        "CudnnConvolutionBackward0",
                                                        "GroupedMmBackward0",
                                                        "LinearBackward0",
                                                        "MkldnnLinearBackward0",
                                                        "MmBackward0",
                                                        "MvBackward0"};
  return names.count(node.name()) != 0;
}

void release_unused_operands(Node& product) {
  namespace nodes = torch::autograd::generated;
  if (auto* mm = dynamic_cast<nodes::MmBackward0*>(&product)) {
    release_unused(product, 0, mm->self_, mm->mat2_);
  } else if (auto* addmm = dynamic_cast<nodes::AddmmBackward0*>(&product)) {
    release_unused(product, 1, addmm->mat1_, addmm->mat2_);
  } else if (auto* bmm = dynamic_cast<nodes::BmmBackward0*>(&product)) {
    release_unused(product, 0, bmm->self_, bmm->mat2_);
  } else if (auto* baddbmm = dynamic_cast<nodes::BaddbmmBackward0*>(&product)) {
    release_unused(product, 1, baddbmm->batch1_, baddbmm->batch2_);
  }
}

}  // namespace pacer::detail
