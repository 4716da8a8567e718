"""Published settings of multi-query associative recall, and the accuracies published for them.

`unstated` of a preset says which settings are ours because the paper does not state them. All
presets differ from the papers in three ways: the model is this repository's (a short gated
convolution and one mixer), rows are drawn fresh instead of from a pool of 100,000, and there is no
dropout.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Published:
  """Accuracies of one paper."""

  source: str
  axis: str  # "d_model", "length" (tokens per row) or "state_bytes"
  accuracy: dict[str, dict[float, str]]  # mixer -> value on the axis -> accuracy as printed
  length: int | None = None  # the only length of rows that the figures are for; None: any


@dataclasses.dataclass(frozen=True)
class Preset:
  """Values of the flags, settings that the paper leaves open, and the paper's accuracies."""

  flags: dict
  unstated: str = ""
  published: tuple[Published, ...] = ()
  # Accuracies that must come out, by mixer.
  at_least: dict[str, float] = dataclasses.field(default_factory=dict)
  below: dict[str, float] = dataclasses.field(default_factory=dict)


def log_space(low: float, high: float, count: int) -> tuple[float, ...]:
  """Returns powers of ten with evenly spaced exponents, to three digits."""
  return tuple(float(f"{10 ** (low + (high - low) * i / (count - 1)):.3g}") for i in range(count))


def steps_of(epochs: int, rows: int, batch: int) -> int:
  return epochs * -(-rows // batch)


def _columns(axis_values, **accuracy: str) -> dict[str, dict[float, str]]:
  return {
    mixer: dict(zip(axis_values, text.split(), strict=True)) for mixer, text in accuracy.items()
  }


WIDTHS = (64, 128, 256, 512)
ZOOLOGY_BATCH = (512, 512, 256, 128)
REACHES: dict[str, float] = dict.fromkeys(("softmax", "deltanet", "gated_deltanet", "kda"), 0.99)
OF_PAPERS = dict(  # what the presets of papers have in common
  output_gate=True,
  vocab_size=8192,
  num_heads=1,
  key_width=None,
  value_width=None,
  schedule="cosine",
  weight_decay=0.1,
  clip=None,
  seeds=1,
  stop_at=0.99,
  stop_checks=1,
)
BASED = dict(  # training on mixtures
  batch=(256,),
  steps=(steps_of(32, 180_000, 256),),
  learning_rates=log_space(-3, -1.5, 4),
  eval_every=704,
  eval_rows=1024,
)

PRESETS: dict[str, Preset] = {
  "quick": Preset(flags={}, at_least=REACHES, below={"linear": 0.85}),
  "zoology-fig2": Preset(
    flags=OF_PAPERS
    | dict(
      length=(64, 128, 256, 512),
      pairs=(4, 8, 16, 64),
      filler="zeros",
      d_model=WIDTHS,
      batch=ZOOLOGY_BATCH,
      steps=tuple(steps_of(64, 100_000, batch) for batch in ZOOLOGY_BATCH),
      learning_rates=log_space(-4, -2, 4),
      eval_every=196,
      eval_rows=3000,
    ),
    unstated="the paper's attention has two layers and learned positions",
    published=(
      Published(
        "Zoology, arXiv:2312.04927, figure 2",
        "d_model",
        _columns(WIDTHS, softmax="1.00 1.00 1.00 1.00"),
        length=512,
      ),
      Published(
        "DeltaNet, arXiv:2406.06484, figure 2",
        "d_model",
        _columns(
          WIDTHS, deltanet="1.00 1.00 1.00 1.00", gla=".22 .95 1.00 1.00", retnet=".05 .87 .96 .97"
        ),
        length=512,
      ),
    ),
  ),
  "based-fig2": Preset(
    flags=OF_PAPERS
    | BASED
    | dict(
      length=(64, 128, 256, 256, 256),
      pairs=(4, 8, 16, 32, 64),
      mixture=True,
      shares=(100_000, 20_000, 20_000, 20_000, 20_000),
      test_length=(64, 64, 64, 128, 256, 512, 1024),
      test_pairs=(4, 8, 16, 32, 64, 128, 256),
      filler="noise",
      d_model=(64, 128, 256),
      num_heads=2,
    ),
    unstated="the paper's attention has one head, and its Mamba-2 keys of 8, 16 and 24",
    published=(
      Published(
        "Based, arXiv:2402.18668, and later runs of its repository",
        "state_bytes",
        dict(
          softmax={525e3: "1.0"},
          gla={4.9e3: ".53", 18e3: ".77"},
          mamba2={8.2e3: ".52", 65e3: ".83"},
          deltanet={8.9e3: ".79", 34e3: ".96", 134e3: ".995"},
          gated_deltanet={17e3: ".89", 67e3: ".99"},
          based={9.3e3: ".67"},
        ),
      ),
    ),
  ),
  "log-linear-table2": Preset(
    flags=OF_PAPERS
    | BASED
    | dict(
      mixers=("softmax", "mamba2", "gated_deltanet"),
      length=(256,),
      pairs=(4, 8, 16, 32, 64),
      mixture=True,
      filler="noise",
      d_model=(16, 32, 64),
      seeds=5,
    ),
    unstated="vocabulary, filler, batch, steps and learning rates are those of Based's figure 2",
    published=(
      Published(
        "Log-linear attention, arXiv:2506.04761, table 2",
        "d_model",
        _columns(
          (16, 32, 64),
          softmax="≥.99 ≥.99 ≥.99",
          mamba2=".469±.023 .751±.049 .896±.061",
          gated_deltanet=".384±.010 .790±.021 ≥.99",
        ),
      ),
    ),
  ),
  "kimi-fig4": Preset(
    flags=OF_PAPERS
    | dict(
      mixers=("mamba2", "gated_deltanet", "kda"),
      length=(256, 512, 1024, 2048),
      pairs=(64, 128, 256, 512),
      filler="noise",
      d_model=(256,),
      num_heads=2,
      key_width=128,
      batch=(64,),
      steps=(20_000,),
      learning_rates=(5e-5, 1e-4, 5e-4, 1e-3),
      clip=1.0,
      eval_every=500,
      eval_rows=256,
      stop_at=0.999,
      stop_checks=2,
    ),
    unstated=(
      "vocabulary, filler, pairs (here a quarter of the length), batch, schedule and weight decay "
      "are ours"
    ),
    published=(
      Published(
        "Kimi Linear, arXiv:2510.26692, figure 4",
        "length",
        _columns(
          (256, 512, 1024, 2048),
          kda="1.00 1.00 1.00 .48",
          gated_deltanet="1.00 1.00 .79 .29",
          mamba2=".98 .00 .00 .00",
        ),
      ),
    ),
  ),
}
