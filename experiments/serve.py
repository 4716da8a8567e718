"""Measures the engine of `lajax.serve`: throughput, latency, shared prefixes, drafts.

    python experiments/serve.py

serves 48 requests of random lengths with an untrained hybrid of three layers of Kimi Delta
Attention and one of MLA, one by one (`lajax.generate`), in static batches, and with engines of 1 to
16 slots. Throughput is that of all requests at once. Then the requests arrive at random, at 70 % of
what the engine can serve, and the command prints the time to the first token and between tokens.

Further requests share a prefix of 2,000 tokens: with a cache of prefixes, and without. The last
line compares two ways to take a draft back: a second call from the kept state, and stored states.

Expected on two CPU cores: with 16 slots at least 5 times the tokens per second of one by one, and
the first token behind a known prefix at least 5 times earlier. All numbers of a run are measured
in that run; other programs change them, and the ratios less. It took six minutes on two cores.

Results go to `runs/serve/results.jsonl`, written anew each time, with `serve.png`. `--help` lists
the flags.
"""

import sys
import time

import before_jax  # isort: skip  # noqa: F401  # before jax
import cli
from results import as_json, read, save, versions, write
from rich.console import Console
from serving import measure, report
from serving.config import PROG, Config, parse
from speed.allocator import keep_freed_memory


def main() -> None:
  keep_freed_memory()
  config = parse(sys.argv[1:])
  try:
    cli.use_device(config.device)
    cli.make_folder(config.out)
  except ValueError as error:
    cli.fail(PROG, str(error))
  try:
    run(config, cli.console(120))
  except KeyboardInterrupt as stop:
    stop.add_note("A new start measures everything again, in minutes.")
    raise


def run(config: Config, console: Console) -> None:
  started = time.perf_counter()
  with console.status("") as status:
    show = lambda text: status.update(text) if console.is_terminal else console.print(text)
    found = [dict(task="slots", **line) for line in measure.by_slots(config, show)]
    found += [dict(task="prefix", **line) for line in measure.prefixes(config, show)]
    found += [dict(task="drafts", **measure.drafts(config, show))]
  path = config.out / "results.jsonl"
  write(path, [dict(line, config=as_json(config), versions=versions()) for line in found])
  lines = read(path)
  console.print(report.throughput_table(lines))
  console.print(report.prefix_table(lines))
  for text in report.draft_lines(config, lines):
    console.print(text)
  save(report.draw(lines), config.out / "serve.png")
  cli.print_facts(console, report.facts(config, lines))
  console.print(f"{config.out}: results.jsonl, serve.png")
  console.print(f"{time.perf_counter() - started:.1f} seconds in all")


if __name__ == "__main__":
  main()
