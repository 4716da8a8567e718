"""Makes `python -m experiments.speed` do the same as `python experiments/speed.py`."""

import before_jax  # isort: skip  # noqa: F401  # before jax
from speed.run import main

if __name__ == "__main__":
  main()
