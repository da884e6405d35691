"""Many problems in a row, in this process: for some minutes, or until so many comparisons are made."""

from __future__ import annotations

import itertools
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from blockgate.errors import BlockgateError
from blockgate.lab.selftest.check import check
from blockgate.lab.selftest.judge import LIMIT, DifferenceError, Findings
from blockgate.lab.selftest.problems import Problem, draw, smaller

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Campaign", "Failure", "run_campaign", "simplest"]

# More failures than this teach nothing.
MOST_FAILURES = 10
# Above this share of problems with mostly zeros in their output, "passed" would mean little.
MISTRUSTED_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Failure:
    """A problem that failed, with the simplest one found that fails in the same way."""

    problem: str
    simplest: str
    message: str

    def __str__(self) -> str:
        return (
            f"{self.message}\n  from blockgate.lab.selftest import Problem, check\n  check({self.simplest})\n"
            f"  (found as {self.problem})"
        )


@dataclass(slots=True)
class Campaign:
    """What a campaign found in one process."""

    findings: Findings = field(default_factory=Findings)
    failures: list[Failure] = field(default_factory=list)
    seeds: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """ "passed", "failed", or "mistrusted" where most outputs were zeros, or nothing was compared."""
        found = self.findings
        if self.failures:
            return "failed"
        empty = not found.comparisons or found.mistrusted > MISTRUSTED_SHARE * found.problems
        return "mistrusted" if empty else "passed"

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "status": self.status,
            "seeds": [*self.seeds],
            "seconds": round(self.seconds, 1),
            "limit": LIMIT,
            **asdict(self.findings),
            "failures": [str(failure) for failure in self.failures],
        }


def run_campaign(
    *,
    first: int = 0,
    seconds: float | None = None,
    comparisons: int | None = None,
    note: Callable[[Campaign], None] | None = None,
    judge: Callable[[Problem], Findings] = check,
) -> Campaign:
    """Judges the problems of the seeds from `first` on, until the time is over or enough comparisons are made.

    Args:
        first: the first seed; below a few hundred, seeds have boundary shapes.
        seconds: how long to go on.
        comparisons: how many comparisons are enough.
        note: called every few seconds with what is known so far.
        judge: what is done with each problem.
    """
    campaign, start = Campaign(seeds=(first, first)), time.monotonic()
    noted = start
    for seed in itertools.count(first):
        problem = draw(seed)
        try:
            campaign.findings.add(judge(problem))
        except Exception as error:
            campaign.findings.problems += 1
            campaign.failures.append(Failure(str(problem), str(simplest(problem, judge)), _message(error)))
        now = time.monotonic()
        campaign.seeds, campaign.seconds = (first, seed + 1), now - start
        over = seconds is not None and campaign.seconds >= seconds
        over |= comparisons is not None and campaign.findings.comparisons >= comparisons
        over |= len(campaign.failures) >= MOST_FAILURES
        if note is not None and (over or now - noted > 5):
            note(campaign)
            noted = now
        if over:
            return campaign
    raise AssertionError("seeds have no end")


def simplest(problem: Problem, judge: Callable[[Problem], Findings] = check, *, seconds: float = 20.0) -> Problem:
    """The simplest problem found that fails as this one does: a minimal reproduction."""
    kind, end = _kind(problem, judge), time.monotonic() + seconds
    while kind:
        for candidate in smaller(problem):
            if time.monotonic() > end:
                return problem
            if _kind(candidate, judge) == kind:
                problem = candidate
                break
        else:
            return problem
    return problem


def _kind(problem: Problem, judge: Callable[[Problem], Findings]) -> str:
    """How a problem fails; empty if it doesn't, or can't be posed."""
    try:
        judge(problem)
    except DifferenceError:
        return "difference"
    except (BlockgateError, ValueError, IndexError):
        return ""
    except Exception as error:
        return type(error).__name__
    return ""


def _message(error: Exception) -> str:
    if isinstance(error, DifferenceError):
        return str(error)
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({where.name}, line {where.lineno})"
