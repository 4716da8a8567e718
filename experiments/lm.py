"""Trains a byte-level hybrid language model on real text, and prints its bits per byte.

    python experiments/lm.py

trains three layers of Kimi Delta Attention and one of MLA for ten minutes, compilation included, on
the sources of Python's standard library without its tests. Every 20th file is held out. The command
prints the bits per byte of the held-out files beside gzip, xz and a context model of order 3, draws
a figure, and lets the model write. Expected on two idle cores: at most 1.9 bits per byte, with
`--minutes 60` at most 1.6. Measured on two cores: 1.505 in ten minutes with 953 CPU seconds, and
1.398 in an hour in which others used the cores too, with 2,325 CPU seconds.

`--text PATH...` trains on other files, `--pattern` with other mixers; `--compare` trains softmax
attention, linear attention and the hybrid at equal numbers of parameters. `--init FOLDER` starts
from the parameters of an earlier run. `--help` lists the flags.

Results go to `runs/lm/results.jsonl`, one line per run with its whole configuration, and each run
has a folder with its log and its Orbax checkpoints. A run whose line exists is not trained again.
One that was stopped goes on from its latest checkpoint, with the same losses as if it had never
been stopped: the text of a step and its learning rate are read off the seed and the log.

How the defaults were chosen: by runs of 150 CPU seconds and one seed, compared by the mean of their
last bits per byte in training, since the held-out files changed between them. Learning rates above
those of the last line, wider models and weight decay were not tried.

* batch 4 x 512 tokens, Muon 0.02 and AdamW 0.004: 2.23. AdamW 0.004 for all parameters: 2.45. The
  first without embeddings of n-grams: 2.74.
* batch 8 x 512, the same otherwise, after 120 CPU seconds, a time of half as many steps: 3.62.
* batch 8 x 256, Muon 0.04 and AdamW 0.008, three changes at once: 2.16.
* The mixers take most of a step, so they are narrow: 2 heads of 32 x 64, chunks of 16 tokens. Short
  convolutions cost half as much as a whole KDA layer without them; n-grams take their place.
"""

import before_jax  # isort: skip  # noqa: F401  # before jax
from lm.command import main

if __name__ == "__main__":
  main()
