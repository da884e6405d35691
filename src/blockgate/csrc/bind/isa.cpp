// isa: the name of the kernel set in use.
#include "host/dispatch.h"

#include <torch/csrc/stable/library.h>

#include <string>

namespace blockgate {
namespace {

std::string isa() { return kernels().name; }

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&blockgate::isa));
}
