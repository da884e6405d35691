"""The tables and figures of the paper, trained and measured here. Needs the extra `train`."""

from blockgate.lab.reproduce.arms import Arm, run_of
from blockgate.lab.reproduce.experiment import SCALES, Experiment
from blockgate.lab.reproduce.experiments import EXPERIMENTS, arms_of, choose_arms
from blockgate.lab.reproduce.order import Order, reproduce

__all__ = ["EXPERIMENTS", "SCALES", "Arm", "Experiment", "Order", "arms_of", "choose_arms", "reproduce", "run_of"]
