"""Puts this folder on the path, so that `python -m experiments.mqar` finds the same modules."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
