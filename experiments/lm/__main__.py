"""Runs the experiment as `python -m experiments.lm`."""

import before_jax  # isort: skip  # noqa: F401  # before jax
from lm.command import main

main()
