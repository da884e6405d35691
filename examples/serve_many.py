"""Serve a packed language model from many processes of one thread each, behind uvicorn and starlette.

    pip install 'blockgate[serve]'
    python examples/serve_many.py --processes 4          # curl -N 'http://127.0.0.1:8000/words?first=7&count=20'
    python examples/serve_many.py --measure              # against one process with as many threads
    python examples/serve_many.py --kill                 # kills a process under load: who loses an answer?

uvicorn hands connections to processes, replaces those that die, refuses connections beyond a limit (503) and lets
answers end before it stops. A word is only computed once the client has taken those before it. The weights are random,
since only the time is of interest here; `blockgate train` trains such models.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import torch
import uvicorn
from serve_lstm import LanguageModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import blockgate as bg
from blockgate.lab.bench import machine

# The last line of a whole answer: a client that doesn't see it asks again.
END = "end"
MOST_WORDS = 1000
# Seconds; a process imports torch and makes its model first.
REPLACED_WITHIN = 60


def make_model(words: int, width: int) -> torch.nn.Module:
    """A gated model, packed to int8, which every process has for itself: 90% of the blocks closed for each word."""
    torch.manual_seed(0)
    model = LanguageModel(words, width).eval()
    bg.sparsify_(model, block_size=64, sparsity=0.9)
    return bg.pack(model, "int8")


def make_app() -> Starlette:
    """The application of one process; uvicorn calls this in each, so options come through the environment."""
    words, width, threads = (int(number) for number in os.environ["SERVE_MANY"].split())
    torch.set_num_threads(threads)
    model = make_model(words, width)

    async def stream(word: int, count: int) -> AsyncIterator[str]:
        state, last = None, torch.tensor([[word]])
        for _ in range(count):
            with torch.inference_mode():
                scores, state = model(last, state)
                last = scores.argmax(-1)
            yield f"{int(last)}\n"
            # Other streams of this process take their turn.
            await asyncio.sleep(0)
        yield f"{END}\n"

    async def answer(request: Request) -> Response:
        first, count = (request.query_params.get(name, default) for name, default in (("first", "0"), ("count", "20")))
        fine = first.isdecimal() and int(first) < words and count.isdecimal() and 0 < int(count) <= MOST_WORDS
        if not fine:
            expected = f"expected first below {words} and count from 1 to {MOST_WORDS}"
            return PlainTextResponse(f"{expected}, got {first!r} and {count!r}\n", 400)
        headers = {"x-process": str(os.getpid())}
        return StreamingResponse(stream(int(first), int(count)), media_type="text/plain", headers=headers)

    return Starlette(routes=[Route("/words", answer)])


class Server:
    """The server in processes of its own, until the `with` block ends."""

    def __init__(self, options: argparse.Namespace, processes: int, threads: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        flags = {"processes": processes, "threads": threads, "port": self.port}
        flags |= {name: getattr(options, name) for name in ("words", "width", "limit")}
        self.command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in flags.items())]

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(self.command)
        while self.process.poll() is None:
            try:
                asyncio.run(ask(self.port, 1))
                return self
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"the server ended with code {self.process.returncode}")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


class Answer(NamedTuple):
    """What a client got: seconds to the first word and to the end, the process, and whether it was whole."""

    first: float
    seconds: float
    process: int
    whole: bool
    refused: bool


async def ask(port: int, count: int) -> Answer:
    """One question, as HTTP in its plainest form."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /words?first=1&count={count} HTTP/1.0\r\n\r\n".encode())
    head, body, first = b"", b"", 0.0
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        while part := await reader.read(1 << 16):
            first = first or time.perf_counter() - began
            body += part
    except (asyncio.IncompleteReadError, ConnectionResetError):
        pass
    writer.close()
    lines = body.decode().split()
    fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
    whole = len(lines) == count + 1 and lines[-1] == END
    refused = b" 503 " in head.split(b"\r\n")[0]
    return Answer(first, time.perf_counter() - began, int(fields.get("x-process", 0)), whole, refused)


async def load(port: int, clients: int, seconds: float, count: int) -> list[Answer]:
    """Answers to clients that ask again as soon as they are answered."""
    end, answers = time.perf_counter() + seconds, []

    async def client() -> None:
        while time.perf_counter() < end:
            try:
                answers.append(await ask(port, count))
            except OSError:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


def measure(options: argparse.Namespace) -> None:
    """Throughput and latency of N processes with one thread, and of one process with N."""
    many, rows, others = options.processes, [], machine.Others()
    print(f"answers of {options.count} words, {options.seconds:g} s each; latencies in ms: to the first word, whole")
    print("processes threads clients   words/s   first p50   p99   whole p50   p99")
    for processes, threads in ((many, 1), (1, many)):
        with Server(options, processes, threads) as server:
            asyncio.run(load(server.port, many, 1.0, options.count))
            for clients in options.clients:
                began = time.perf_counter()
                answers = asyncio.run(load(server.port, clients, options.seconds, options.count))
                rate = options.count * sum(a.whole for a in answers) / (time.perf_counter() - began)
                times = [quantiles([a.first for a in answers]), quantiles([a.seconds for a in answers])]
                shown = "   ".join(f"{p50 * 1e3:9.1f} {p99 * 1e3:5.1f}" for p50, p99 in times)
                print(f"{processes:9} {threads:7} {clients:7} {rate:9.0f}   {shown}", flush=True)
                rows.append([processes, threads, clients, f"{rate:.0f}", *(f"{t * 1e3:.1f}" for p in times for t in p)])
    if options.output is not None:
        options.output.write_text(report(options, rows, str(others)))


def report(options: argparse.Namespace, rows: list[list[object]], others: str) -> str:
    """What was measured, on which machine, and by which command."""
    about = ", ".join(f"{name} {value}" for name, value in machine.describe().items())
    table = [
        "| processes | threads of each | clients | words/s | first word, p50 ms | p99 | whole answer, p50 ms | p99 |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        *("| " + " | ".join(map(str, row)) + " |" for row in rows),
    ]
    what = (
        f"Answers of {options.count} words, {options.seconds:g} s for each line; a model of width {options.width} with "
        f"{options.words:,} words, int8, 90% closed. Other programs used {others} meanwhile."
    )
    command = f"python {shlex.join(['examples/serve_many.py', *sys.argv[1:]])}"
    return "\n\n".join(["# Serving many", f"`{command}`", f"{about}.", what, "\n".join(table)]) + "\n"


def quantiles(times: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return statistics.median(times), sorted(times)[int(0.99 * len(times))]


def kill(options: argparse.Namespace) -> None:
    """Kills one of the processes while clients ask, until another has taken its place, and counts what is lost."""
    with Server(options, options.processes, 1) as server:
        victim = asyncio.run(ask(server.port, 1)).process

        async def disturbed() -> tuple[list[Answer], float]:
            asked = asyncio.create_task(load(server.port, options.clients[0], options.seconds, options.count))
            await asyncio.sleep(options.seconds / 2)
            os.kill(victim, signal.SIGKILL)
            began, answers = time.perf_counter(), await asked
            while len(others(answers)) < options.processes and time.perf_counter() - began < REPLACED_WITHIN:
                answers += await load(server.port, options.clients[0], 0.5, options.count)
            return answers, time.perf_counter() - began

        def others(answers: list[Answer]) -> set[int]:
            return {a.process for a in answers if a.whole} - {victim}

        answers, seconds = asyncio.run(disturbed())
    lost = [a for a in answers if not a.whole and not a.refused]
    of_others = sum(a.process not in {victim, 0} for a in lost)
    print(f"{len(answers)} answers; replaced after at most {seconds:.1f} s")
    print(f"{len(lost) - of_others} answers lost with the process, {of_others} of other processes")
    if of_others or len(others(answers)) < options.processes:
        raise SystemExit("expected a new process, and whole answers from all others")


def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or Ctrl-C; answers that have begun are finished first."""
    os.environ["SERVE_MANY"] = f"{options.words} {options.width} {options.threads}"
    uvicorn.run(
        f"{Path(__file__).stem}:make_app",
        factory=True,
        app_dir=str(Path(__file__).parent),
        port=options.port,
        workers=options.processes,
        limit_concurrency=options.limit,
        timeout_graceful_shutdown=30,
        log_level="warning",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--limit", type=int, default=64, help="connections of a process; more are refused with 503")
    parser.add_argument("--words", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--count", type=int, default=32, help="words of an answer, when measuring")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8], help="at once, when measuring")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--output", type=Path, help="Markdown file for what was measured")
    parser.add_argument("--kill", action="store_true")
    arguments = parser.parse_args()
    (measure if arguments.measure else kill if arguments.kill else serve)(arguments)
