"""The tables and figures of the paper, trained and measured here. Needs the extra `train`."""

from blockgate.lab.reproduce.arms import EXPERIMENTS, SCALES, Arm, choose_arms
from blockgate.lab.reproduce.experiment import Order, reproduce

__all__ = ["EXPERIMENTS", "SCALES", "Arm", "Order", "choose_arms", "reproduce"]
