"""The operations: check the arguments, choose the form, run it. Shapes are [B T H D]; see `lajax._shapes` for the letters."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax import _shapes
from lajax._numerics import accumulation_dtype, alike, product_precision
from lajax.recurrence import attention as _softmax
from lajax.recurrence import delta_rule as _delta
from lajax.recurrence import drive
from lajax.recurrence import linear_attention as _linear
from lajax.recurrence import linear_recurrence as _elementwise

Matrix = Float[Array, "B HV K V"]


def linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV | B T HV K"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g)
  dtype, precision = accumulation_dtype(q, k, v, g, initial_state), product_precision(q, k, v)
  wide = functools.partial(_cast, dtype=dtype)
  scale = sizes["K"] ** -0.5 if scale is None else scale
  tokens = _linear.Tokens(wide(q) * scale, wide(k), wide(v), wide(g))
  state = _state(initial_state, sizes, dtype)
  o, state = _run(_linear.rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  return o.astype(v.dtype), state


def normalized_linear_attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  scale: float | None = None,
  eps: float = 1e-10,
  initial_state: tuple[Matrix, Float[Array, "B HV K"]] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], tuple[Matrix, Float[Array, "B HV K"]]]:
  initial, z = (None, None) if initial_state is None else initial_state
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV | B T HV K"),
    initial_state=(initial, "B HV K V"), initial_normalizer=(z, "B HV K"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  joined = None if initial is None or z is None else jnp.concatenate([initial, z[..., None]], axis=-1)
  values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)  # z is the state of a value that is always 1
  out, state = linear_attention(
    q, k, values.astype(accumulation_dtype(v)), g, scale=scale, initial_state=joined, segment_ids=segment_ids,
    chunk_size=chunk_size, impl=impl,
  )  # fmt: skip
  o = out[..., :-1] / (out[..., -1:] + eps)
  return o.astype(v.dtype), (state[..., :-1], state[..., -1])


def delta_rule(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T H K"],
  v: Float[Array, "B T HV V"],
  beta: Float[Array, "B T HV"] | None,
  g: Float[Array, "B T HV"] | Float[Array, "B T HV K"] | None = None,
  *,
  erase: Float[Array, "B T HV K"] | None = None,
  write: Float[Array, "B T HV V"] | None = None,
  scale: float | None = None,
  initial_state: Matrix | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  chunk_size: int | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T HV V"], Matrix]:
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), beta=(beta, "B T HV"), g=(g, "B T HV | B T HV K"),
    erase=(erase, "B T HV K"), write=(write, "B T HV V"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  if (beta is None) == (erase is None) or (erase is None) != (write is None):
    raise ValueError("give either `beta`, or (with beta=None) both `erase` and `write`; got another mixture of the three.")
  _shapes.check_not_nan(g=g, beta=beta, erase=erase, write=write)
  dtype, precision = accumulation_dtype(q, k, v, beta, g, erase, write, initial_state), product_precision(q, k, v)
  wide = functools.partial(_cast, dtype=dtype)
  scale = sizes["K"] ** -0.5 if scale is None else scale
  groups = _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  keys = jnp.repeat(wide(k), groups, axis=2)
  if beta is None:
    r, u = keys * wide(erase), wide(v) * wide(write)
  else:
    strength = wide(beta)[..., None]
    r, u = keys * strength, wide(v) * strength
  tokens = _delta.Tokens(wide(q) * scale, wide(k), r, u, wide(g))
  state = _state(initial_state, sizes, dtype)
  o, state = _run(_delta.rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision)
  return o.astype(v.dtype), state


def linear_recurrence(
  x: Float[Array, "B T *D"],
  log_a: Float[Array, "B T *D"],
  *,
  initial_state: Float[Array, "B *D"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  impl: str = "auto",
) -> tuple[Float[Array, "B T *D"], Float[Array, "B *D"]]:
  channels = " ".join(f"D{n}" for n in range(x.ndim - 2))
  sizes = _shapes.check(
    x=(x, f"B T {channels}"), log_a=(log_a, f"B T {channels}"), initial_state=(initial_state, f"B {channels}"),
    segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(log_a=log_a)
  dtype = accumulation_dtype(x, log_a, initial_state)
  flat = lambda a: a.astype(dtype).reshape(*x.shape[:2], 1, -1)
  h0 = jnp.zeros((x.shape[0], *x.shape[2:]), dtype) if initial_state is None else initial_state.astype(dtype)
  tokens = _elementwise.Tokens(flat(x), flat(log_a))
  one_head = {**sizes, "H": 1, "HV": 1}
  h, state = _run(_elementwise.rule, tokens, h0.reshape(x.shape[0], 1, -1, 1), segment_ids, one_head, impl, None, None)
  return h.reshape(x.shape).astype(x.dtype), state.reshape(h0.shape)


def attention(
  q: Float[Array, "B T H K"],
  k: Float[Array, "B T HK K"],
  v: Float[Array, "B T HK V"],
  *,
  causal: bool = True,
  window: int | None = None,
  sink: Float[Array, "H"] | None = None,
  log_forget: Float[Array, "B T H"] | None = None,
  scale: float | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  impl: str = "auto",
) -> Float[Array, "B T H V"]:
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T HK K"), v=(v, "B T HK V"), sink=(sink, "H"), log_forget=(log_forget, "B T H"),
    segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_multiple("HK", "H", sizes, ("`k` and `v`", "`q`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("window", window)
  _shapes.check_not_nan(log_forget=log_forget)
  if impl == "pallas":
    raise NotImplementedError("impl='pallas' has no kernel for attention yet; use impl='chunked' or impl='auto'.")
  if impl == "auto":
    impl = "chunked"
  B, T = q.shape[:2]
  if segment_ids is None:
    position, runs = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)), jnp.zeros((B, T), jnp.int32)
  else:
    run, real = drive.segments(segment_ids)
    position, runs = jnp.cumsum(real, axis=1, dtype=jnp.int32), jnp.where(real, run, -1)
    q, k, v, log_forget = drive.blank_padding((q, k, v, log_forget), real)
  return _softmax.attend(
    q, k, v, q_positions=position, k_positions=position, q_segments=runs, k_segments=runs, causal=causal, window=window,
    sink=sink, log_forget=log_forget, scale=scale, impl=impl,
  )  # fmt: skip


def _cast(x, dtype):
  return None if x is None else x.astype(dtype)


def _state(initial, sizes, dtype):
  if initial is None:
    return jnp.zeros((sizes["B"], sizes["HV"], sizes["K"], sizes["V"]), dtype)
  return initial.astype(dtype)


def _run(rule, tokens, state, segment_ids, sizes, impl, chunk_size, precision):
  _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  _shapes.check_option("impl", impl, _shapes.IMPLS)
  _shapes.check_positive("chunk_size", chunk_size)
  if impl == "pallas":
    raise NotImplementedError("impl='pallas' has no kernel for this operation yet; use impl='chunked' or impl='auto'.")
  if impl == "auto":
    impl = "recurrent" if sizes["T"] == 1 else "chunked"
  return _compute(rule, tokens, state, segment_ids, impl, chunk_size or 64, precision)


@functools.partial(jax.jit, static_argnames=("rule", "impl", "chunk_size", "precision"))
def _compute(rule, tokens, state, segment_ids, impl, chunk_size, precision):
  state = alike(state, tokens)
  runs = real = None
  if segment_ids is not None:
    runs, real = drive.segments(segment_ids)
    tokens = drive.blank_padding(tokens, real)
  if impl == "chunked":
    o, state = drive.chunked(rule, tokens, state, runs, chunk_size=chunk_size, precision=precision)
  else:
    form = {"recurrent": drive.recurrent, "associative": drive.associative}[impl]
    o, state = form(rule, tokens, state, runs)
  return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype)), state
