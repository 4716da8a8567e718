"""Trains a byte-level hybrid language model on real text, and prints its bits per byte.

    python experiments/lm.py

trains three layers of Kimi Delta Attention and one of MLA for ten minutes, compilation included, on
the sources of Python's standard library without its tests. Every 20th file is held out. The command
prints the bits per byte of the held-out files beside gzip, xz and a context model of order 3, draws
a figure, and lets the model write. Expected on two cores: at most 1.9 bits per byte, with
`--minutes 60` at most 1.6.

`--text PATH...` trains on other files, `--pattern` with other mixers; `--compare` trains softmax
attention, linear attention and the hybrid at equal numbers of parameters. `--init FOLDER` starts
from the parameters of an earlier run. `--help` lists the flags.

Results go to `runs/lm/results.jsonl`, one line per run with its whole configuration, and each run
has a folder with its log and its Orbax checkpoints. A run whose line exists is not trained again.
One that was stopped goes on from its latest checkpoint, with the same losses as if it had never
been stopped: the text of a step and its learning rate are read off the seed and the log.

Chosen by experiment (see `lm/run.py` for the values): TODO
"""

import before_jax  # isort: skip  # noqa: F401  # before jax
from lm.command import main

if __name__ == "__main__":
  main()
