"""Trains token mixers on recall and state tracking: does the known order come out?

    python experiments/recall.py

trains the mixers of eight rows, A to I: multi-query associative recall with wide and narrow keys
and by one layer of attention, recall of values that are written twice and among noise, parity, and
the permutations of three things. A row names the mixers that must answer and those that must not.
Each is trained with three seeds at each of three learning rates, on fresh rows in every step. Then
a table says of each row whether it came out, with the margin and the spread over the seeds, and a
figure per row shows the accuracy over the steps and at every learning rate.

    python experiments/recall.py --quick

trains rows A, D, G and I with one seed and one learning rate.

    python experiments/recall.py --task parity --mixers deltanet deltanet_negative

trains on one task and scores rows up to 64 times as long. `--measure` times a stack of runs beside
one run at a time. `--help` lists the flags.

Runs that differ in seed and learning rate alone are one program, and one program per processor
trains at a time. Results go to `runs/recall/results.jsonl`, one line per run with its whole
configuration. A run whose line exists is not trained again, so the command can be stopped with
Ctrl-C and started again; the lines of a mixer are written when all its runs have ended. The table
and the figures are made from the lines alone.
"""

import os

# The programs fill the processors, so that threads inside a program would only wait.
os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {os.environ.get('XLA_FLAGS', '')}"

import before_jax  # isort: skip  # noqa: F401  # before jax
from recall.suite import main

if __name__ == "__main__":
  main()
