"""How a layer chooses between ways that give the same result, driven by a clock that the test turns.

`csrc/host/choice.h` is free of torch: it is compiled here by itself, with a clock that stands still until it is told.
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
#include "host/choice.h"
using blockgate::Choice;
static double now = 1;
static Choice* made = nullptr;
extern "C" {
void make() {
  delete made;
  made = new Choice([] { return now; });
}
// One call: `threads` of each way, and the seconds that each would take. Returns the way it took.
int call(int count, const int64_t* threads, const double* seconds, double work) {
  Choice::Ways ways;
  for (int w = 0; w < count; ++w) ways.add({threads[w], w});
  int took = -1;
  now += 1e-5;
  made->run(ways, work, [&](Choice::Way way) { now += seconds[took = way.kind]; });
  return took;
}
void rest(double seconds) { now += seconds; }
int64_t falls() { return made->state().falls; }
int64_t looks() { return made->state().looks; }
double estimate(int way) { return made->state().seconds[way]; }
}
"""
TEAM, ALONE = 0, 1
# Calls per look, looks that may be saved up, and the calls of a rest: see choice.h.
RARE, SAVED, REST = 500, 4, 8


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choice")
    (folder / "choice.cpp").write_text(CODE)
    include = Path(blockgate.__file__).parent / "csrc"
    command = [COMPILER, "-std=c++20", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, "choice.cpp", "-o", "choice.so"], cwd=folder, check=True)
    made = ctypes.CDLL(str(folder / "choice.so"))
    made.estimate.restype = ctypes.c_double
    return made


class Calls:
    """A layer whose calls take what the test says, by way."""

    def __init__(self, library, threads=(2, 1)):
        self.library, self.threads = library, threads
        self.taken = []
        library.make()

    def run(self, count, *seconds, work=1.0):
        """So many calls that take these seconds by way; the ways they took."""
        of = len(self.threads)
        threads, times = (ctypes.c_int64 * of)(*self.threads), (ctypes.c_double * of)(*seconds)
        taken = [self.library.call(of, threads, times, ctypes.c_double(work)) for _ in range(count)]
        self.taken += taken
        return taken

    @property
    def falls(self):
        return self.library.falls()

    def estimate(self, way):
        return self.library.estimate(ctypes.c_int(way))


@pytest.fixture
def calls(library):
    return Calls(library)


@pytest.mark.parametrize(("seconds", "best"), [((1.0, 1.8), TEAM), ((1.0, 0.6), ALONE), ((1.0, 1.03), TEAM)])
def test_the_faster_way_is_taken_and_the_other_one_seldom(calls, seconds, best):
    calls.run(100, *seconds)
    taken = calls.run(20_000, *seconds)
    assert taken.count(1 - best) <= len(taken) / RARE
    assert taken.count(1 - best) > 0


def test_looks_are_one_call_in_500_but_for_a_few_that_were_saved(calls):
    for count in range(1, 30):
        calls.run(1000, 1.0, 3.0)
        assert calls.taken.count(ALONE) <= SAVED + 1000 * count / RARE
        assert calls.library.looks() == calls.taken.count(ALONE)


def test_a_call_that_takes_several_times_its_estimate_leads_to_one_thread_at_once(calls):
    calls.run(200, 1.0, 1.8)
    assert calls.run(1, 20.0, 1.8) == [TEAM]
    assert set(calls.run(REST - 1, 20.0, 1.8)) == {ALONE}
    assert calls.falls == 1


def test_a_moment_of_disturbance_is_soon_forgotten(calls):
    calls.run(2000, 1.0, 1.8)
    calls.run(1, 20.0, 1.8)
    assert calls.run(REST + 1, 1.0, 1.8)[-1] == TEAM
    assert set(calls.run(100, 1.0, 1.8)) == {TEAM}


def test_a_crowd_that_stays_costs_one_call_in_500(calls):
    calls.run(2000, 1.0, 1.8)
    taken = calls.run(20_000, 20.0, 1.8)
    assert taken.count(TEAM) <= 1 + SAVED + len(taken) / RARE
    assert calls.run(1000, 1.0, 1.8)[-1] == TEAM, "it never comes back when the crowd is gone"


def test_a_crowd_that_hits_one_call_in_ten_costs_few_of_them(calls):
    calls.run(2000, 1.0, 1.8)
    slow = 0
    for _ in range(2000):
        slow += calls.run(9, 1.0, 1.8).count(None)
        slow += calls.run(1, 20.0, 1.8).count(TEAM)
    assert slow <= 1 + SAVED + 2 * 20_000 / RARE
    assert calls.taken.count(ALONE) > 0.8 * 20_000


def test_slow_calls_on_one_thread_change_nothing(calls):
    calls.run(100, 1.0, 0.5)
    calls.run(3, 5.0, 20.0)
    assert set(calls.run(200, 1.0, 0.5)) == {ALONE}
    assert calls.falls == 0


def test_no_fall_to_one_thread_that_would_take_longer_still(library):
    calls = Calls(library, threads=(64, 1))
    calls.run(200, 1.0, 40.0)
    calls.run(1, 8.0, 40.0)
    assert calls.run(1, 1.0, 40.0) == [TEAM]
    calls.run(1, 50.0, 40.0)
    assert calls.run(1, 1.0, 40.0) == [ALONE]


def test_of_two_ways_on_one_thread_the_faster_one_catches_the_fall(library):
    calls = Calls(library, threads=(2, 1, 2, 1))
    seconds = (1.0, 1.9, 1.2, 1.6)
    calls.run(200, *seconds)
    calls.run(1, 30.0, 1.9, 30.0, 1.6)
    assert set(calls.run(REST - 1, *seconds)) == {3}


def test_a_lasting_change_is_followed(calls):
    calls.run(3000, 1.0, 1.8)
    calls.run(3000, 2.2, 1.8)  # slower, but not several times
    assert calls.run(1000, 2.2, 1.8).count(ALONE) >= 998
    calls.run(4000, 1.0, 1.8)
    assert calls.run(1000, 1.0, 1.8).count(TEAM) >= 998


def test_the_first_call_finds_everything_cold_and_teaches_nothing(calls):
    calls.run(1, 100.0, 1.8)
    calls.run(3, 1.0, 1.8)
    assert calls.estimate(TEAM) == pytest.approx(1.0)


def test_estimates_are_for_a_unit_of_work(calls):
    calls.run(100, 1.0, 1.8, work=1.0)
    calls.run(100, 7.0, 12.6, work=7.0)
    assert calls.falls == 0
    assert calls.estimate(TEAM) == pytest.approx(1.0)


def test_other_ways_are_learned_anew(calls):
    calls.run(1000, 1.0, 0.5)
    calls.threads = (7, 1)
    assert calls.run(5, 1.0, 0.5) == [TEAM] * 5
    assert set(calls.run(500, 1.0, 0.5)[-100:]) == {ALONE}


@pytest.mark.parametrize("pause", [2e-3, 1e6])
def test_a_call_after_a_pause_teaches_nothing(calls, pause):
    calls.run(2000, 1.0, 1.8)
    calls.run(2000, 1.0, 1.8)
    for _ in range(40):
        calls.library.rest(ctypes.c_double(pause))
        calls.run(1, 9.0, 12.0)
        calls.run(20, 1.0, 1.8)
    assert calls.falls == 0
    assert calls.estimate(TEAM) == pytest.approx(1.0)


def test_calls_that_always_come_after_a_while_do_teach(calls):
    for _ in range(200):
        calls.library.rest(ctypes.c_double(0.1))
        calls.run(1, 9.0, 6.0)
    assert calls.taken.count(ALONE) > 150
