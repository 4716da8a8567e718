"""The byte-level language model: a hybrid of `lajax.layers` behind an embedding of n-grams."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from lm.run import Run

import lajax.layers as L
import lajax.models as M
from lajax._operations import operations

VOCABULARY = 256
# Embeddings of bytes begin at this size; those of n-grams begin at 0.
EMBEDDING_SIZE = 0.5


def kda(run: Run) -> tuple[type, dict]:
  return L.KimiDeltaAttention, delta(run)


def gated_deltanet(run: Run) -> tuple[type, dict]:
  return L.GatedDeltaNet, delta(run)


def delta(run: Run) -> dict:
  return dict(
    num_heads=run.num_heads,
    head_dim=run.key_width,
    expand_v=run.value_width / run.key_width,
    conv_size=run.conv_size,
    chunk_size=run.chunk_size,
  )


def mla(run: Run) -> tuple[type, dict]:
  """Makes MLA without positions, as in Kimi Linear: the layers around it know the order."""
  return L.MLA, dict(
    num_heads=run.num_heads,
    head_dim=run.key_width,
    value_dim=run.value_width,
    kv_rank=run.value_width,
    rope_dim=run.key_width // 2,
    rope_theta=None,
    max_length=run.eval_length,
  )


def softmax(run: Run) -> tuple[type, dict]:
  return L.SoftmaxAttention, dict(
    num_heads=run.num_heads,
    head_dim=run.value_width,
    rope_theta=10_000.0,
    max_length=run.eval_length,
  )


MIXERS: dict[str, Callable[[Run], tuple[type, dict]]] = dict(
  kda=kda, gated_deltanet=gated_deltanet, mla=mla, softmax=softmax
)


class ByteModel(M.LanguageModel):
  """A language model of bytes whose inputs are embeddings of a byte and of the n-grams it ends.

      x_t = E[b_t] + sum_n E_n[hash(b_{t-n+1} .. b_t)]

  Its tokens are those of `lm.data`, which hold the bytes of the n-grams. Each E_n has a fixed
  number of rows, and n-grams whose hashes agree share one.
  """

  def __init__(self, run: Run, *, rngs: nnx.Rngs):
    dtype = jnp.bfloat16 if run.bf16 else None
    super().__init__(config_of(run), dtype=dtype, rngs=rngs)
    self.orders = run.ngrams
    zeros = lambda: nnx.Param(jnp.zeros((run.ngram_rows, run.d_model), jnp.float32))
    self.ngrams = nnx.List([zeros() for _ in run.ngrams])

  def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns the inputs of the first layer."""
    x = super().embed(tokens & 0xFF)
    for order, table in zip(self.orders, self.ngrams, strict=True):
      x = x + table[...][row_of(tokens, order, table.shape[0])].astype(x.dtype)
    return x


def row_of(tokens: Int[Array, "B T"], order: int, rows: int) -> Int[Array, "B T"]:
  """Returns the row of the last `order` bytes: the upper bits of a product, `rows` a power of two.

  The constants are those of the 32-bit finalizer of MurmurHash3.
  """
  code = tokens.astype(jnp.uint32) & jnp.uint32(2 ** (8 * order) - 1)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    code = (code ^ (code >> jnp.uint32(shift))) * jnp.uint32(factor)
  return (code >> jnp.uint32(32 - (rows.bit_length() - 1))).astype(jnp.int32)


def config_of(run: Run) -> M.ModelConfig:
  """Returns the config of the model behind the embedding."""
  pattern = [M.MixerConfig(*MIXERS[name](run)) for name in run.pattern]
  return M.hybrid_config(
    VOCABULARY,
    run.d_model,
    pattern,
    run.layers,
    mlp=run.mlp_width,
    tied_head=False,
    embedding_multiplier=EMBEDDING_SIZE / 0.02,
  )


def build(run: Run, rngs: nnx.Rngs) -> ByteModel:
  """Returns the model of a run."""
  return ByteModel(run, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Cost:
  """Sizes of a model.

  Attributes:
    parameters: all of them.
    ngram_parameters: those in the tables of n-grams, of which a token reads one row per table.
    operations: multiplications and additions of training per token: three times those of a forward
      pass, as the backward pass makes two products of each.
  """

  parameters: int
  ngram_parameters: int
  operations: float


def cost_of(run: Run) -> Cost:
  """Traces a model, and returns its sizes."""
  model = nnx.eval_shape(lambda: build(run, nnx.Rngs(0)))
  graph, variables = nnx.split(model)
  rows = jax.ShapeDtypeStruct((run.batch, run.length), jnp.int32)
  forward = lambda variables, tokens: nnx.merge(graph, variables)(tokens)[0]
  program = jax.make_jaxpr(forward)(variables, rows)
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  return Cost(
    size(nnx.state(model, nnx.Param)),
    size(nnx.state(model.ngrams, nnx.Param)),
    3 * operations(program) / (run.batch * run.length),
  )


@functools.cache
def parameters_of(run: Run) -> int:
  """Returns the number of parameters."""
  model = nnx.eval_shape(lambda: build(run, nnx.Rngs(0)))
  return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def product_speed(run: Run, size: int = 1024, repeats: int = 10) -> float:
  """Returns operations per second of a product of square matrices: the best of a few."""
  x = jnp.ones((size, size), jnp.bfloat16 if run.bf16 else jnp.float32)
  product = jax.jit(lambda x: x @ x)
  product(x).block_until_ready()
  seconds = math.inf
  for _ in range(repeats):
    started = time.perf_counter()
    product(x).block_until_ready()
    seconds = min(seconds, time.perf_counter() - started)
  return 2 * size**3 / seconds
