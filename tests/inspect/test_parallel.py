"""Recording a model that is wrapped for parallel training.

In a process of its own, which ends at once: torch's gloo threads may wait for the interpreter's lock while they are
waited for, when a wrapped model is deleted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PARALLEL = """
import os, sys, torch
import blockgate as bg
from tests.inspect.helpers import small_net

torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(small_net())
with bg.record_gates(net) as record:
    net(torch.randn(7, 6)).sum().backward()
print({name: stats.rows for name, stats in record.gates.items()}, flush=True)
os._exit(0)
"""


def test_a_model_in_distributed_data_parallel(tmp_path):
    command = [sys.executable, "-c", PARALLEL, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "{'module.2': 7, 'module.4': 7}", done.stderr
