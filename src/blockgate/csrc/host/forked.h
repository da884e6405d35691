// Whether this process was forked from one that may have had threads.
#pragma once

namespace blockgate {

// OpenMP's threads do not survive a fork: a child that waits for them would wait for ever.
bool forked();

}  // namespace blockgate
