"""`blockgate demo`: small language models, dense and gated, trained and timed in minutes, and a page that shows them."""

from blockgate.demo.experiment import DemoOrder, run_demo


__all__ = ["DemoOrder", "run_demo"]
