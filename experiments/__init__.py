"""Lets `python -m experiments.mqar` find the modules that `python experiments/mqar.py` finds beside itself."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
