// fail_request: lets tests see what happens when memory runs out.
#include "host/buffer.h"

#include <torch/csrc/stable/library.h>

namespace blockgate {
namespace {

int64_t fail(int64_t which) { return fail_request(which); }

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CompositeExplicitAutograd, m) {
  m.impl("fail_request", TORCH_BOX(&blockgate::fail));
}
