"""Scratch memory of the kernels: absurd sizes are refused, and what is kept for the next call is bounded.

`csrc/host/buffer.cpp` is free of torch: it is compiled here by itself.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import blockgate

COMPILER = shutil.which("c++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

CODE = """
#include "host/buffer.h"
#include <atomic>
#include <cstring>
#include <new>
#include <thread>
#include <unistd.h>
#include <sys/wait.h>
#include <vector>
using namespace blockgate;
extern "C" {
// Whether a buffer of so many numbers is refused as memory that is not there.
bool refused(int64_t count) {
  try {
    Buffer<double> asked(count);
    return false;
  } catch (const std::bad_alloc&) {
    return true;
  }
}
int64_t kept() { return int64_t(kept_memory()); }
void use(int64_t bytes) { Buffer<char> buffer(bytes); }
// Threads that each take buffers of many sizes, fill them and look whether anybody else wrote there: how often.
int64_t mixed(int threads, int rounds) {
  std::atomic<int64_t> faults{0};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] {
      uint64_t seed = t + 1;
      for (int r = 0; r < rounds; ++r) {
        std::vector<Buffer<unsigned char>> held;
        std::vector<int64_t> sizes;
        for (int i = 0; i < 6; ++i) {
          seed = seed * 6364136223846793005ull + 1442695040888963407ull;
          sizes.push_back(1 + int64_t((seed >> 33) % (int64_t(1) << (8 + (seed >> 20) % 14))));
          held.emplace_back(sizes.back());
          std::memset(held.back().get(), 16 * t + i, sizes.back());
          if (uintptr_t(held.back().get()) % 64) ++faults;
        }
        for (int i = 0; i < 6; ++i)
          for (int64_t at : {int64_t(0), sizes[i] / 2, sizes[i] - 1})
            faults += held[i][at] != (unsigned char)(16 * t + i);
      }
    });
  for (auto& thread : all) thread.join();
  return faults;
}
// Children forked while other threads take and give buffers: how many did not end well.
int forked(int children) {
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int t = 0; t < 3; ++t)
    busy.emplace_back([&] { while (!over) use(1 << 20); });
  int failed = 0;
  for (int i = 0; i < children; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      for (int r = 0; r < 20; ++r) use(1 << 20);
      _exit(7);
    }
    int status = 0;
    waitpid(child, &status, 0);
    failed += !(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  }
  over = true;
  for (auto& thread : busy) thread.join();
  return failed;
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buffer")
    (folder / "test.cpp").write_text(CODE)
    source = Path(blockgate.__file__).parent / "csrc"
    command = [COMPILER, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", f"-I{source}"]
    files = ["test.cpp", str(source / "host" / "buffer.cpp")]
    subprocess.run([*command, *files, "-o", "buffer.so"], cwd=folder, check=True)
    made = ctypes.CDLL(str(folder / "buffer.so"))
    made.refused.restype = ctypes.c_bool
    made.refused.argtypes = made.use.argtypes = [ctypes.c_int64]
    made.kept.restype = made.mixed.restype = ctypes.c_int64
    return made


@pytest.mark.parametrize(
    "count", [-1, -(2**63), 2**44 + 1, 2**58 + 1, 2**61 - 1, 2**61, 2**61 + 1, 2**62, 2**63 - 1], ids=hex
)
def test_absurd_sizes_are_refused(library, count):
    assert library.refused(count)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1000, 2**14, 2**14 + 1, 2**20])
def test_others_are_not(library, count):
    assert not library.refused(count)


def test_what_is_kept_is_bounded(library):
    most = 64 << 20
    for megabytes in (*range(1, 60, 3), 65, 200):
        library.use(megabytes << 20)
        assert library.kept() <= most
    assert library.kept() >= 55 << 20


def test_a_kept_buffer_serves_the_next_call(library):
    library.use(30 << 20)
    before = library.kept()
    library.use((30 << 20) - 100)
    assert library.kept() == before


def test_threads_share_and_never_overlap(library):
    assert library.mixed(4, 300) == 0
    assert 0 < library.kept() <= 64 << 20


def test_children_forked_meanwhile_do_not_wait(library):
    assert library.forked(30) == 0
