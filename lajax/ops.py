"""The operations: check the arguments, choose the form, run it. Shapes are [B T H D]; `lajax._shapes` has the letters.

Forms, in every operation: `impl="recurrent"` is the printed equation, token by token; `"associative"` is
`jax.lax.associative_scan` over tokens, and keeps T states; `"chunked"` is matrix products inside chunks and a scan over the
chunks; `"pallas"` is for GPU kernels. `"auto"` takes what suits the device and the shapes. A named form never falls back.

Gradients: every form can be differentiated in all float arguments, `"recurrent"` and `"chunked"` also forwards; `"chunked"` has
first derivatives only. Log decays may be anything in [-inf, 0]; a positive one is computed as asked for. Each new T compiles
once; nothing is tuned at run time.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from lajax import _shapes
from lajax._numerics import accumulation_dtype, alike, product_precision
from lajax.recurrence import attention as _softmax
from lajax.recurrence import delta_rule as _delta
from lajax.recurrence import drive
from lajax.recurrence import linear_attention as _linear
from lajax.recurrence import linear_recurrence as _elementwise

Matrix = Float[Array, "B HV K V"]

CHUNK = 64  # tokens in a chunk
DIRECT = 512  # tokens up to which attention's matrix of scores is made whole


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
  """Additive state with optional decay.

      S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ,   o_t = scale S_t^T q_t

  Args:
    q, k: [B T H K]; head h serves the value heads n h .. n h + n - 1 where HV = n H.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for the default, 64.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: no decay: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20; one a head: Sun et
  al., "Retentive Network", 2023, arXiv:2307.08621, equation 6, and Dao and Gu, "Transformers are SSMs" (Mamba-2), 2024,
  arXiv:2405.21060, equation 16; one a channel: Yang et al., "Gated Linear Attention Transformers", 2023, arXiv:2312.06635,
  equation 3.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV | B T HV K"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(g=g)
  dtype, precision = accumulation_dtype(q, k, v, g, initial_state), product_precision(q, k, v)
  tokens = _linear.Tokens(q.astype(dtype) * _scale(scale, sizes), k.astype(dtype), v.astype(dtype), _cast(g, dtype))
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
  """Linear attention divided by its normalizer.

      S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T ,   z_t = Diag(exp g_t) z_{t-1} + k_t ,
      o_t = scale S_t^T q_t / (scale q_t . z_t + eps)

  Args:
    q, k: [B T H K], features that should not be negative.
    v: [B T HV V].
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    scale: of q; None for K^-1/2. It cancels but for eps.
    eps: added to the denominator.
    initial_state: (S [B HV K V], z [B HV K]), the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for the default, 64.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state (S [B HV K V], z [B HV K]) after the last real token, in float32 (float64 if an
    input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Paper: Katharopoulos et al., "Transformers are RNNs", 2020, arXiv:2006.16236, equations 18-20.
  """
  initial, z = (None, None) if initial_state is None else initial_state
  _shapes.check(
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
  """Delta rule: the decayed state is corrected at k towards v.

      S'_t = Diag(exp g_t) S_{t-1} ,   S_t = S'_t + k_t (beta_t (v_t - S'_t^T k_t))^T ,   o_t = scale S_t^T q_t

  With `erase` b and `write` w in the place of beta: S_t = S'_t + k_t (w_t v_t - S'_t^T (b_t k_t))^T, channel by channel.

  Args:
    q, k: [B T H K]; k is expected at unit length (`lajax.layers` does that); head h serves the value heads n h .. n h + n - 1.
    v: [B T HV V].
    beta: [B T HV], write strength, in (0, 1), or (0, 2) for negative eigenvalues; None with `erase` and `write`.
    g: log decay (natural), <= 0: None for none, [B T HV] for one a head, [B T HV K] for one a channel of the key.
    erase, write: [B T HV K] and [B T HV V], in (0, 1).
    scale: of the output; None for K^-1/2.
    initial_state: [B HV K V], the state before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it reads, writes and decays nothing, and its output is 0.
    chunk_size: tokens in a chunk of the chunked form, taken up to a power of two of at least 16; None for the default, 64.
    impl: the form, see above.

  Returns:
    o [B T HV V] in v.dtype, and the state after the last real token, [B HV K V] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (DeltaNet), 2024, arXiv:2406.06484, equation 4;
  Yang et al., "Gated Delta Networks", 2024, arXiv:2412.06464, equation 10; one decay a channel: Kimi Team, "Kimi Linear" (KDA),
  2025, arXiv:2510.26692, equation 1.
  """
  sizes = _shapes.check(
    q=(q, "B T H K"), k=(k, "B T H K"), v=(v, "B T HV V"), beta=(beta, "B T HV"), g=(g, "B T HV | B T HV K"),
    erase=(erase, "B T HV K"), write=(write, "B T HV V"),
    initial_state=(initial_state, "B HV K V"), segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  if (beta is None) == (erase is None) or (erase is None) != (write is None):
    raise ValueError("give either `beta`, or (with beta=None) both `erase` and `write`; got another mixture of the three.")
  _shapes.check_not_nan(g=g, beta=beta, erase=erase, write=write)
  dtype, precision = accumulation_dtype(q, k, v, beta, g, erase, write, initial_state), product_precision(q, k, v)
  groups = _shapes.check_multiple("H", "HV", sizes, ("`q` and `k`", "`v`"))
  if segment_ids is not None:  # before products of two inputs, so that NaN in padding stays out of gradients too
    k, v, beta, erase, write = drive.blank_padding((k, v, beta, erase, write), segment_ids >= 0)
  k = k.astype(dtype)
  reads = writes = beta[..., None] if beta is not None else None
  if erase is not None and write is not None:
    reads, writes = erase, write
  r, u = jnp.repeat(k, groups, axis=2) * _cast(reads, dtype), v.astype(dtype) * _cast(writes, dtype)
  tokens = _delta.Tokens(q.astype(dtype) * _scale(scale, sizes), k, r, u, _cast(g, dtype))
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
  """Elementwise linear recurrence.

      h_t = exp(log_a_t) h_{t-1} + x_t

  Args:
    x: [B T ..], any axes behind (for Mamba: channels and state).
    log_a: the same shape; log decay (natural), <= 0.
    initial_state: [B ..], h before the first token; None for zeros.
    segment_ids: [B T], the document of each token. A change of id sets the state to zero (the initial state belongs to the
      first document); a token of id < 0 is padding: it writes and decays nothing, and its output is 0.
    impl: the form, see above; "auto" is the token scan on a CPU, where it is the fastest, and chunked elsewhere.

  Returns:
    h [B T ..] in x.dtype, and h after the last real token, [B ..] in float32 (float64 if an input is).

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", 2017, arXiv:1709.04057, equation
  5; De et al., "Griffin" (RG-LRU), 2024, arXiv:2402.19427, equation 4; Gu and Dao, "Mamba", 2023, arXiv:2312.00752, equation 2a.
  """
  channels = " ".join(f"D{n}" for n in range(np.ndim(x) - 2))
  sizes = _shapes.check(
    x=(x, f"B T {channels}"), log_a=(log_a, f"B T {channels}"), initial_state=(initial_state, f"B {channels}"),
    segment_ids=(segment_ids, "B T", "int"),
  )  # fmt: skip
  _shapes.check_not_nan(log_a=log_a)
  dtype = accumulation_dtype(x, log_a, initial_state)
  flat = lambda a: a.astype(dtype).reshape(*x.shape[:2], 1, math.prod(x.shape[2:]))
  h0 = jnp.zeros((x.shape[0], *x.shape[2:]), dtype) if initial_state is None else initial_state.astype(dtype)
  tokens = _elementwise.Tokens(flat(x), flat(log_a))
  one_head = {**sizes, "H": 1, "HV": 1}
  h, state = _run(_elementwise.rule, tokens, h0.reshape(x.shape[0], 1, math.prod(x.shape[2:]), 1), segment_ids, one_head, impl, None, None)
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
  """Softmax attention, exactly; the chunked form takes memory linear in T.

      o_i = sum_j p_ij v_j ,   p_ij = exp(s_ij) / (exp(sink) + sum_j' exp(s_ij')) ,
      s_ij = scale q_i . k_j + sum of log_forget_l over j < l <= i

  over the tokens j that i reads: j <= i if causal, i - j < window, the same document.

  Args:
    q: [B T H K].
    k, v: [B T HK K], [B T HK V], where HK divides H; head h of q reads head h // (H / HK).
    causal: whether a token reads only itself and tokens before it.
    window: how many tokens, itself included, a token reads at most (on either side, if not causal); None for all.
    sink: [H], a logit that takes part in the denominator alone; None for none.
    log_forget: [B T H], log forget gates (natural), <= 0, not scaled; None for none. Needs `causal`.
    scale: of the scores; None for K^-1/2.
    segment_ids: [B T], the document of each token: documents do not read each other. A token of id < 0 is padding: nobody
      reads it, its output is 0, and distances in a window do not count it.
    impl: the form, see above. "recurrent": one query after the other. "associative": softmax over blocks of keys, merged as
      a tree. "chunked": the same, one block after the other. "auto": `jax.nn.dot_product_attention` for short sequences
      where it has the options, else chunked.

  Returns:
    o [B T H V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value, or (outside jit) a gate holds NaN.
    NotImplementedError: the named form does not exist for this.

  Papers: Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, equation 1; Dao et al., "FlashAttention", 2022,
  arXiv:2205.14135, algorithm 1; sink: Xiao et al., 2023, arXiv:2309.17453; log_forget: Lin et al., "Forgetting Transformer",
  2025, arXiv:2503.02130, equation 3.
  """
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
  if log_forget is not None and not causal:
    raise ValueError("`log_forget` needs causal=True: a gate stands between a token and those before it; got causal=False.")
  if 0 in q.shape or 0 in v.shape:
    return jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
  if isinstance(scale, Tracer):
    raise ValueError("`scale` must be a number known when the function is traced; got a traced array. Multiply `q` by it.")
  scale = None if scale is None else float(scale)
  return _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl)


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "impl"))
def _attention(q, k, v, sink, log_forget, segment_ids, causal, window, scale, impl):
  B, T = q.shape[:2]
  position, runs, real = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)), jnp.zeros((B, T), jnp.int32), None
  if segment_ids is not None:
    run, real = drive.segments(segment_ids)
    position, runs = jnp.cumsum(real, axis=1, dtype=jnp.int32), jnp.where(real, run, -1)
    q, k, v, log_forget = drive.blank_padding((q, k, v, log_forget), real)
  alike_widths = q.shape[-1] == v.shape[-1] and q.dtype == k.dtype == v.dtype
  plain = sink is None and log_forget is None and alike_widths and q.dtype != jnp.float64
  if impl == "auto" and plain and T <= DIRECT:
    places = _softmax.Where(position, runs)
    mask = None
    if segment_ids is not None or window is not None:
      mask = _softmax.visible(places, places, causal, window)[:, None]
    with jax.default_matmul_precision("default" if product_precision(q, k, v) == lax.Precision.DEFAULT else "highest"):
      o = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, is_causal=causal and mask is None)
    return o if real is None else jnp.where(real[..., None, None], o, jnp.zeros((), o.dtype))
  return _softmax.attend(
    q, k, v, q_positions=position, k_positions=position, q_segments=runs, k_segments=runs, causal=causal, window=window,
    sink=sink, log_forget=log_forget, scale=scale, impl="chunked" if impl == "auto" else impl,
  )  # fmt: skip


def _cast(x, dtype) -> Any:
  return None if x is None else x.astype(dtype)


def _scale(scale: float | None, sizes) -> float:
  return sizes["K"] ** -0.5 if scale is None else scale


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
    elementwise = rule is _elementwise.rule and jax.default_backend() == "cpu"
    impl = "recurrent" if sizes["T"] == 1 or elementwise else "chunked"
  if sizes["T"] == 0 or 0 in state.shape:
    return jnp.zeros((sizes["B"], sizes["T"], *state.shape[1:2], *state.shape[3:]), state.dtype), state
  return _compute(rule, tokens, state, segment_ids, impl, chunk_size or CHUNK, precision)


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
