"""Writes text with a model behind a prompt, and says how fast.

    python experiments/generate.py --model FOLDER --prompt "Once upon a time"

FOLDER is a checkpoint as Hugging Face lays it out: `config.json`, `*.safetensors` and
`tokenizer.json`; if it has a chat template, the prompt becomes the first message of a chat. The
command prints the text as it comes, then the tokens per second of the prefill and of the decode
loop, and the bytes of the state. Compiling happens before the clock starts, and is printed too.

`--temperature 0.8 --top-p 0.9` samples. `--help` lists the flags. Reading text needs
`pip install "lajax[text]"`.
"""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
import jax
from text import Text

from lajax import models
from lajax.models import Completion, complete

PROG = "generate.py"


@dataclasses.dataclass(frozen=True)
class Config:
  """Writes text with a model behind a prompt."""

  model: pathlib.Path = pathlib.Path()
  """Folder of the checkpoint."""
  prompt: str = ""
  """Beginning of the text, or the first message of a chat."""
  raw: bool = False
  """Leave the folder's chat template out."""
  max_tokens: int = 128
  """New tokens, if the text does not end earlier."""
  temperature: float = 0.0
  """0 takes the most likely token."""
  top_k: int | None = None
  """Draw from this many of the most likely tokens."""
  top_p: float | None = None
  """Draw from the fewest most likely tokens whose probabilities sum to this."""
  min_p: float | None = None
  """Draw from tokens of at least this part of the largest probability."""
  seed: int = 0
  """Seed of the drawn tokens."""
  prefill_piece: int = 256
  """Tokens of the prompt per call."""
  device: str = "auto"
  """JAX's name of a kind of device, such as cpu or gpu."""


def main(arguments: Sequence[str] | None = None) -> None:
  config = cli.parse(Config(), sys.argv[1:] if arguments is None else arguments, PROG)
  try:
    check(config)
    cli.use_device(config.device)
    text = Text(config.model)
    prompt = text.encode(config.prompt, chat=not config.raw)
    model = models.load(config.model)
    run(config, model, text, prompt)
  except (ValueError, ImportError) as error:
    cli.fail(PROG, str(error))


def check(config: Config) -> None:
  """ValueError for flags that are missing or wrong; lajax checks the options of sampling."""
  if config.model == Config.model:
    raise ValueError("--model is missing: the folder of a checkpoint")
  if not config.model.is_dir():
    raise ValueError(f"--model {config.model}: no such folder")
  if not config.prompt:
    raise ValueError("--prompt is missing: what the text begins with")
  cli.check_at_least_one(config, "max_tokens", "prefill_piece", "top_k")


def run(config: Config, model, text: Text, prompt: list[int]) -> None:
  """Prints the text and its times."""
  options: dict[str, Any] = dict(
    temperature=config.temperature,
    top_k=config.top_k,
    top_p=config.top_p,
    min_p=config.min_p,
    stop_tokens=text.stop_tokens,
    key=jax.random.key(config.seed),
    prefill_piece=config.prefill_piece,
  )
  started = time.perf_counter()
  short = prompt[: config.prefill_piece + 1]  # compiles all that the prompt needs
  complete(model, [short], 1, **options)
  compiled = time.perf_counter() - started
  times = [time.perf_counter()]
  new: list[int] = []
  pieces = iter(text.decode(iter_growing(new)))

  def show(tokens) -> None:
    times.append(time.perf_counter())
    new.append(int(tokens[0]))
    print(next(pieces), end="", flush=True)

  found = complete(model, [prompt], config.max_tokens, callback=show, **options)
  print("\n")
  for line in report(len(prompt), found, times, compiled):
    print(line)


def iter_growing(tokens: list[int]):
  """Yields the items of a list that grows; each is there when it is asked for."""
  n = 0
  while True:
    yield tokens[n]
    n += 1


def report(prompt: int, found: Completion, times: list[float], compiled: float) -> list[str]:
  """Returns the lines behind the text.

  Args:
    prompt: tokens of the prompt.
    found: the new tokens.
    times: when the prefill began, and when each new token was there.
    compiled: seconds before, for the compilation.
  """
  start, first, *_, last = *times, times[-1]
  steps = len(times) - 2
  decode = f"{steps / (last - first):,.1f} tokens/s" if steps else "one token only"
  size = sum(x.nbytes for x in jax.tree.leaves(found.state))
  return [
    f"prefill: {prompt:,} tokens, {prompt / (first - start):,.1f} tokens/s, first token included",
    f"decode: {steps:,} tokens, {decode}, each printed as it came",
    f"state: {size:,} bytes after {prompt + int(found.lengths[0]) - 1:,} tokens",
    f"ended by {'a stop token' if found.stopped[0] else '--max-tokens'}; compiled in "
    f"{compiled:.1f} s",
  ]


if __name__ == "__main__":
  main()
