"""One training run over two hosts, one of which is lost in the middle: `sudo python tests/tools/two_hosts.py`.

The hosts are two network namespaces joined by a virtual cable, with addresses of their own; nothing else can be
reached from them. torchrun connects them. The run is done once undisturbed; then again, and all processes of the second
host are killed (SIGKILL) in the middle. Once the host is back the run goes on from the last checkpoint, and must end
with the same bits. Needs Linux, the right to make namespaces (root), and `ip` of iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from blockgate.lab.training.checkpoint import load_checkpoint
from blockgate.lab.training.config import OptimizerConfig, run_to_plain
from tests.corpora import tiny_text_run, write_texts

PORT = 29400
PATIENCE = 900


class Host:
    """A network namespace with one address, and torchrun in it."""

    def __init__(self, name: str, address: str, log: Path) -> None:
        self.name, self.address, self.log = name, address, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, first: str, strategy: str, words: list[str]) -> None:
        """Runs `blockgate` under torchrun; `first` is the address where the hosts meet."""
        command = [
            *("ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", f"--local-addr={self.address}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={first}:{PORT}", f"--rdzv-id={strategy}"),
            f"--rdzv-conf=is_host={int(first == self.address)}",
            *("-m", "blockgate", *words),
        ]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
        # Else torchrun's first host tells a host that takes another's place no address (torch 2.13).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def lose(self) -> int:
        """Kills every process of the host; returns how many there were."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        for pid in pids.stdout.split():
            os.kill(int(pid), 9)
        if self.process is not None:
            self.process.wait()
        return len(pids.stdout.split())

    def wait(self) -> None:
        """Until torchrun ends, which must be well."""
        assert self.process is not None
        code = self.process.wait(PATIENCE)
        if code:
            said = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted(self.log.parent.glob("*.log")))
            sys.exit(f"{self.name} ended with code {code}\n{said}")


def ip(*words: str) -> None:
    """A command of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def missing() -> str:
    """Why there can be no two hosts here, or ""."""
    if shutil.which("ip") is None:
        return "no command ip: install iproute2"
    made = subprocess.run(["ip", "netns", "add", "bg-try"], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no right to make network namespaces: {made.stderr.strip()}"
    ip("netns", "del", "bg-try")
    return ""


def join(stack: ExitStack, folder: Path) -> tuple[Host, Host]:
    """Two hosts and a cable between them, until the stack is closed."""
    hosts = tuple(Host(f"bg-{n}-{os.getpid()}", f"10.77.0.{n}", folder / f"host-{n}.log") for n in (1, 2))
    for host in hosts:
        ip("netns", "add", host.name)
        stack.callback(ip, "netns", "del", host.name)
        stack.callback(host.lose)
    one, two = hosts
    ip("link", "add", "cable", "netns", one.name, "type", "veth", "peer", "name", "cable", "netns", two.name)
    for host in hosts:
        ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "cable")
        for device in ("cable", "lo"):
            ip("-n", host.name, "link", "set", device, "up")
    return one, two


def run_over(hosts: tuple[Host, Host], config: Path, output: Path, strategy: str, *, lose_after: int | None) -> int:
    """Trains; returns how many updates the checkpoint had that the run went on from, 0 if nothing was lost."""
    words = ["train", str(config), "--output", str(output), "--resume", "--nodes", "2", "--strategy", strategy]
    one, two = hosts
    for host in hosts:
        host.start(one.address, f"{strategy}-{output.name}", words)
    went_on_from = 0
    if lose_after is not None:
        end = time.monotonic() + PATIENCE
        while (went_on_from := updates_of(output)) < lose_after:
            if time.monotonic() > end or two.process is None or two.process.poll() is not None:
                sys.exit(f"no checkpoint in time:\n{one.log.read_text()[-3000:]}")
            time.sleep(0.02)
        print(f"  host 2 is lost after update {went_on_from}: {two.lose()} processes killed", flush=True)
        went_on_from = updates_of(output)
        time.sleep(2)
        two.start(one.address, f"{strategy}-{output.name}", words)
        print("  host 2 is back", flush=True)
    for host in hosts:
        host.wait()
    return went_on_from


def updates_of(output: Path) -> int:
    """How far the last checkpoint is; 0 if there is none."""
    file = output / "last.pt"
    return int(load_checkpoint(file)["training"]["updates"]) if file.is_file() else 0


def compare(strategy: str, folder: Path) -> None:
    """One strategy, undisturbed and disturbed."""
    texts = write_texts(folder / "texts", train=1000, other=101)
    optimizer = OptimizerConfig(kind="adam", lr=0.01, clip=0.25, revive=0.3)
    run = tiny_text_run(texts, folder / "run", epochs=8, checkpoint_seconds=0.0, optimizer=optimizer)
    config = folder / "run.json"
    config.write_text(json.dumps(run_to_plain(replace(run, devices=1))))
    with ExitStack() as stack:
        hosts = join(stack, folder)
        began = time.monotonic()
        run_over(hosts, config, folder / "whole", strategy, lose_after=None)
        print(f"{strategy}: undisturbed, {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        before = run_over(hosts, config, folder / "disturbed", strategy, lose_after=10)
        print(f"  went on from update {before}, {time.monotonic() - began:.0f} s", flush=True)
    whole, disturbed = (load_checkpoint(folder / name / "last.pt") for name in ("whole", "disturbed"))
    if not 0 < before < whole["training"]["updates"] == disturbed["training"]["updates"]:
        sys.exit("the run was not disturbed in the middle")
    different = [name for name, value in whole["model"].items() if not torch.equal(value, disturbed["model"][name])]
    if different or len(whole["training"]["processes"]) != 2:
        sys.exit(f"different ends: {', '.join(different)}")
    print(f"  after {whole['training']['updates']} updates all {len(whole['model'])} tensors are equal, bit by bit")


def main(strategies: list[str]) -> None:
    """All of it, in a folder that is gone afterwards."""
    if reason := missing():
        print(f"two hosts can't be made here: {reason}", file=sys.stderr)
        sys.exit(3)
    # Namespaces and processes go when the stack that made them is left.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for strategy in strategies:
        with tempfile.TemporaryDirectory(prefix="two-hosts-") as folder:
            compare(strategy, Path(folder))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    main(parser.parse_args().strategies)
