"""The selftest: the library against an independent formula, on problems without end."""

from blockgate.lab.selftest.campaign import Campaign, run_campaign, simplest
from blockgate.lab.selftest.check import check
from blockgate.lab.selftest.judge import LIMIT, DifferenceError, Findings
from blockgate.lab.selftest.problems import Problem, draw

__all__ = ["LIMIT", "Campaign", "DifferenceError", "Findings", "Problem", "check", "draw", "run_campaign", "simplest"]
