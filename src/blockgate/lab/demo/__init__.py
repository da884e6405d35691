"""`blockgate demo`: small language models, dense and gated, trained and timed in minutes, and a page about them."""

from blockgate.lab.demo.experiment import DemoOrder, run_demo
from blockgate.lab.demo.page import results_table, write_page
from blockgate.lab.demo.verdict import speed_sentence

__all__ = ["DemoOrder", "results_table", "run_demo", "speed_sentence", "write_page"]
