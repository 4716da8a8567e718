"""Times each operation, in each implementation, beside the plainest code and other libraries.

    python experiments/speed.py

prints four tables:

1. Every core op in every implementation at batch 1, 4096 tokens, 4 heads of width 64, float32, and
   the baselines of `speed/baselines.py` in the same run: the forward pass, then the loss sum(o o) +
   sum(state state) with the gradients of all inputs (forward+backward).
2. The decoding of one token, early and late in a sequence.
3. With `--scaling`: the time of the chunked implementation against the number of tokens.
4. The compile time of one training step's gradient for single layers and stacks of layers (alone:
   `--compile`).

`--ops all` adds the other methods: RWKV-6 and 7, Gated DeltaNet 2, delta products, Oja's rule,
Comba, mLSTM, and the systems of 2026. The command takes about 5 minutes on two idle CPU cores, more
than half of it compilation; `--ops all` and `--scaling` take about 4 more each. The last line gives
wall time and CPU time: the difference is waiting.

Expected on two CPU cores: for each core op with a matrix state, `chunked` has the fastest
  forward+backward, at least 3
times as fast as a naive token scan. Its time grows linearly (slope at most 1.05, attention apart).
Decoding takes the same time at every position.

Results are added to `runs/speed/results.jsonl`, one line per row of the tables. `--help` lists the
flags.

How it measures: all programs are compiled first, one after the other. Then they run in rounds, each
  once per round, so
that a change of the machine's load meets all of them alike. Times are medians over the rounds. The
ratio compares a row with the reference in the same round (median over the rounds of reference /
row); the reference is the naive token scan of the same op and number of tokens, and for attention
the quadratic softmax. Associative scans keep a transition for every token and compile slowly: they
are timed for two ops, if needed at fewer tokens with a reference of as many; `--associative all`
times them for every op.

Memory: on a CPU, --scaling runs in a process of its own that keeps the memory that it frees
  (`speed/allocator.py`). By
default glibc returns large arrays to the system after each call, and the system zeroes their pages
when they are used again: a fifth of the time of the cheapest ops at 32k tokens, whose slope is then
up to 1.10. `--keep-memory never` shows that. `--keep-memory always` keeps memory in the main part
too: programs that use much of it gain most, the naive scans a third. For a program of your own that
computes on a CPU with such arrays:

    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_ARENA_MAX=1 python ...
"""

import before_jax  # isort: skip  # noqa: F401  # before jax
from speed.run import main

if __name__ == "__main__":
  main()
