"""One token of each family, for decoding: step(state, token) -> (state, output). No axis T.

A step is its op on one token: the same problem of its family, the same checks, the same numbers.
Like the op with `impl="auto"`, it runs the equation, or on an NVIDIA GPU the kernel of one token.
On explicit meshes the state keeps its layout, so that it rides in a scan.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from lajax import _shapes
from lajax._meshes import explicit_mesh, on_automatic_axes
from lajax.recurrence import families, levels, mamba3, mesa, momentum, preconditioned
from lajax.recurrence import family as rows
from lajax.recurrence.family import Call, Family

Matrix = Float[Array, "B HV K V"]
WithNormalizer = tuple[Matrix, Float[Array, "B HV K"]]
WithMaximum = tuple[Matrix, Float[Array, "B HV K"], Float[Array, "B HV"]]
# By family: Call of one token -> the `run` of `family.solve` by a kernel, which compares by value,
# or None where the equation runs. `lajax.ops` fills it.
KERNELS_OF_STEPS: dict[Family, Callable] = {}


def linear_attention_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
  bonus: Float[Array, "H K"] | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.linear_attention`.

      S = Diag(exp g) S + k v^T ,   o = scale S^T q

  With `bonus` u the token reads the state before: o = scale (S + Diag(u) k v^T)^T q.

  Args:
    state: [B HV K V], before the token.
    q, k, v: [B H K], [B H K] and [B HV V].
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    scale: factor of the output; None for K^-1/2.
    bonus: [H K], weight of the token's own write; None to read the state behind the token.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  arrays = dict(q=q, k=k, v=v, g=g)
  if bonus is None:
    return _step(families.LINEAR_ATTENTION, state, arrays, scale)
  return _step(families.LINEAR_ATTENTION_WITH_BONUS, state, arrays | {"bonus": bonus}, scale)


def normalized_linear_attention_step(
  state: WithNormalizer,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
  eps: float = 1e-10,
) -> tuple[WithNormalizer, Float[Array, "B HV V"]]:
  """One token of `lajax.normalized_linear_attention`.

      S = Diag(exp g) S + k v^T ,   z = Diag(exp g) z + k ,   o = scale S^T q / (scale q.z + eps)

  Args:
    state: (S [B HV K V], z [B HV K]), before the token.
    q, k, v: [B H K], [B H K] and [B HV V]; features q and k should not be negative.
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    scale: factor of q; None for K^-1/2.
    eps: added to the denominator, a number of at least 0.

  Returns:
    The state (S, z) behind the token, in float32 (float64 if an input is), and o [B HV V] in
    v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  eps = _shapes.check_not_negative("eps", eps)
  return _step(
    families.NORMALIZED_LINEAR_ATTENTION, state, dict(q=q, k=k, v=v, g=g), scale, {"eps": eps}
  )


def delta_rule_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"] | None,
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  erase: Float[Array, "B HV K"] | None = None,
  write: Float[Array, "B HV V"] | None = None,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.delta_rule`.

      S' = Diag(exp g) S ,   S = S' + k (beta (v - S'^T k))^T ,   o = scale S^T q

  Args:
    state: [B HV K V], before the token.
    q, k, v: [B H K], [B H K] and [B HV V]; k is expected at unit length.
    beta: [B HV], write strength; None with `erase` and `write`.
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    erase, write: [B HV K] and [B HV V], strengths per channel in place of `beta`.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  _shapes.check_strengths(beta, erase, write)
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, erase=erase, write=write)
  return _step(families.DELTA_RULE, state, arrays, scale)


def delta_product_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B R H K"],
  v: Float[Array, "B R HV V"],
  beta: Float[Array, "B R HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.delta_product`: one decay, R delta steps, one read.

      S^0 = Diag(exp g) S ,   S^r = S^{r-1} + k^r (beta^r (v^r - S^{r-1}^T k^r))^T ,
      o = scale S^R^T q

  Args:
    state: [B HV K V], before the token.
    q: [B H K].
    k, v, beta: [B R H K], [B R HV V] and [B R HV], the token's R corrections.
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  return _step(families.DELTA_PRODUCT, state, dict(q=q, k=k, v=v, beta=beta, g=g), scale)


def gated_oja_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV V"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.gated_oja`.

      S' = S Diag(exp g) ,   S = S' + (k - S' v) (beta v)^T ,   o = scale S^T q

  Args:
    state: [B HV K V], before the token.
    q, k, v: [B H K], [B H K] and [B HV V]; v is expected at unit length.
    beta: [B HV], write strength.
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV V] per channel of the value.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  return _step(families.GATED_OJA, state, dict(q=q, k=k, v=v, beta=beta, g=g), scale)


def dplr_step(
  state: Matrix,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  a: Float[Array, "B H K"],
  b: Float[Array, "B H K"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Matrix, Float[Array, "B HV V"]]:
  """One token of `lajax.dplr`.

      S = Diag(exp g) S + b (S^T a)^T + k v^T ,   o = scale S^T q

  Args:
    state: [B HV K V], before the token.
    q, k, a, b: [B H K]; `a` reads the state before its decay.
    v: [B HV V].
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  return _step(families.DPLR, state, dict(q=q, k=k, v=v, a=a, b=b, g=g), scale)


def preconditioned_delta_rule_step(
  state: WithNormalizer,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
  beta_precond: Float[Array, "B H"],
  g_precond: Float[Array, "B H"],
  *,
  base: float = 1.5,
  eps: float = 1e-6,
  center: float = -0.2,
  scale: float | None = None,
) -> tuple[WithNormalizer, Float[Array, "B HV V"]]:
  """One token of `lajax.preconditioned_delta_rule`.

      A = exp(g') A + beta' k^2 ,   r = log(A + eps) - center ,   m = base^(-r / (1 + |r|)) ,
      S' = Diag(exp g) S ,   S = S' + (m k) (beta (v - S'^T k))^T ,   o = scale S^T q

  Args:
    state: (S [B HV K V], A [B H K]), before the token.
    q, k, v: [B H K], [B H K] and [B HV V]; k is expected at unit length.
    beta: [B HV], write strength.
    g: log decay (natural), <= 0: None for none, [B HV] per head, [B HV K] per channel of the key.
    beta_precond, g_precond: [B H], strength and log decay of A.
    base, eps, center: of m: a number above 0, one of at least 0, and a number.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state (S, A) behind the token, in float32 (float64 if an input is), and o [B HV V] in
    v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, beta_precond=beta_precond, g_precond=g_precond)
  family = preconditioned.PRECONDITIONED_DELTA_RULE
  return _step(family, state, arrays, scale, preconditioned.options_of(base, eps, center))


def momentum_delta_rule_step(
  state: tuple[Matrix, Matrix],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  p: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  eta: Float[Array, "B HV"],
  g: Float[Array, "B HV"],
  g_momentum: Float[Array, "B HV"],
  *,
  scale: float | None = None,
) -> tuple[tuple[Matrix, Matrix], Float[Array, "B HV V"]]:
  """One token of `lajax.momentum_delta_rule`.

      M' = exp(m) M - eta k (v - S^T p)^T ,   S' = exp(g) S - beta M' ,   o = scale S'^T q

  Args:
    state: (S [B HV K V], M [B HV K V]), before the token.
    q, k, p, v: [B H K] thrice, and [B HV V].
    beta, eta: [B HV], step size along the momentum, and strength of the correction.
    g, g_momentum: [B HV], log decays (natural) of S and of M, <= 0.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state (S, M) behind the token, in float32 (float64 if an input is), and o [B HV V] in
    v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  arrays = dict(q=q, k=k, p=p, v=v, beta=beta, eta=eta, g=g, g_momentum=g_momentum)
  return _step(momentum.MOMENTUM_DELTA_RULE, state, arrays, scale)


def mlstm_step(
  state: WithMaximum,
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  i: Float[Array, "B HV"],
  f: Float[Array, "B HV"],
  *,
  scale: float | None = None,
) -> tuple[WithMaximum, Float[Array, "B HV V"]]:
  """One token of `lajax.mlstm`.

      m' = max(f + m, i) ,   C = exp(f + m - m') C + exp(i - m') k v^T ,   n likewise with k ,
      o = scale C^T q / max(|scale n.q|, exp(-m'))

  Args:
    state: (C [B HV K V], n [B HV K], m [B HV]), before the token.
    q, k, v: [B H K], [B H K] and [B HV V].
    i, f: [B HV], log gates (natural): of the input, of any sign; of forgetting, <= 0.
    scale: factor of q; None for K^-1/2.

  Returns:
    The state (C, n, m) behind the token, in float32 (float64 if an input is), and o [B HV V] in
    v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  return _step(families.MLSTM, state, dict(q=q, k=k, v=v, i=i, f=f), scale)


def mamba3_step(
  state: tuple[Matrix, Array, Array],
  q: Float[Array, "B H K"] | Float[Array, "B R H K"],
  k: Float[Array, "B H K"] | Float[Array, "B R H K"],
  v: Float[Array, "B HV V"] | Float[Array, "B R HV V"],
  g: Float[Array, "B HV"],
  dt: Float[Array, "B HV"],
  trapezoid: Float[Array, "B HV"],
  *,
  scale: float | None = 1.0,
) -> tuple[tuple[Matrix, Array, Array], Array]:
  """One token of `lajax.mamba3`.

      S = exp(g) S + (1 - lambda) dt exp(g) k' v'^T + lambda dt k v^T ,   o = scale S^T q

  with the k' and v' of the token before.

  Args:
    state: (S [B HV K V], k', v'), before the token.
    q, k: [B H K], or [B R H K] for MIMO.
    v: [B HV V], or [B R HV V] for MIMO.
    g, dt, trapezoid: [B HV], log decay (natural) <= 0, step size, and lambda in (0, 1).
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state (S, k, v) behind the token, in float32 (float64 if an input is), and o of the shape
    and dtype of v.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  family = mamba3.MAMBA3_MIMO if getattr(q, "ndim", 3) == 4 else mamba3.MAMBA3
  return _step(family, state, dict(q=q, k=k, v=v, g=g, dt=dt, trapezoid=trapezoid), scale)


def mesa_step(
  state: tuple[Float[Array, "B HV K K"], Matrix],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  beta: Float[Array, "B HV"],
  g: Float[Array, "B HV"] | None,
  ridge: Float[Array, "H K"],
  *,
  cg_steps: int | None = None,
  scale: float | None = 1.0,
) -> tuple[tuple[Float[Array, "B HV K K"], Matrix], Float[Array, "B HV V"]]:
  """One token of `lajax.mesa`.

      G = exp(g) G + beta k k^T ,   S = exp(g) S + beta k v^T ,
      o = scale S^T (G + Diag(ridge))^(-1) q

  Args:
    state: (G [B HV K K], S [B HV K V]), before the token.
    q, k, v: [B H K], [B H K] and [B HV V].
    beta: [B HV], weight of the token, at least 0.
    g: [B HV], log decay (natural), <= 0; None for none.
    ridge: [H K], above 0.
    cg_steps: of conjugate gradients; None for an exact solution.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state (G, S) behind the token, in float32 (float64 if an input is), and o [B HV V] in
    v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  options = {"cg_steps": _shapes.check_positive("cg_steps", cg_steps)}
  arrays = dict(q=q, k=k, v=v, beta=beta, g=g, ridge=ridge)
  return _step(mesa.MESA, state, arrays, scale, options)


def log_linear_attention_step(
  state: tuple[Float[Array, "B HV L-1 K V"], Float[Array, "B"]],
  q: Float[Array, "B H K"],
  k: Float[Array, "B H K"],
  v: Float[Array, "B HV V"],
  g: Float[Array, "B HV"],
  level_scales: Float[Array, "B HV L"],
  beta: Float[Array, "B HV"] | None = None,
  *,
  scale: float | None = 1.0,
) -> tuple[tuple[Float[Array, "B HV L-1 K V"], Float[Array, "B"]], Float[Array, "B HV V"]]:
  """One token of `lajax.log_linear_attention`.

      o = scale (sum_l level_scales^l S^l)^T q

  Behind the token the levels that it fills join in the next one.

  Args:
    state: (S [B HV L-1 K V], position [B]), before the token.
    q, k, v: [B H K], [B H K] and [B HV V].
    g: [B HV], log decay (natural), <= 0.
    level_scales: [B HV L], of the token itself and of L - 1 levels.
    beta: [B HV], write strength of the delta rule; None for an additive state.
    scale: factor of the output; None for K^-1/2.

  Returns:
    The state behind the token, in float32 (float64 if an input is), and o [B HV V] in v.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size, dtype or value.
  """
  levels.check_levels("state", state, level_scales)
  arrays = dict(q=q, k=k, v=v, g=g, level_scales=level_scales, beta=beta)
  return _step(levels.LOG_LINEAR, state, arrays, scale)


def linear_recurrence_step(
  state: Float[Array, "B *D"], x: Float[Array, "B *D"], log_a: Float[Array, "B *D"]
) -> tuple[Float[Array, "B *D"], Float[Array, "B *D"]]:
  """One token of `lajax.linear_recurrence`.

      h = exp(log_a) h + x

  Args:
    state: [B ..], h before the token.
    x: [B ..].
    log_a: [B ..], log decay (natural), <= 0.

  Returns:
    h behind the token twice: as the state, in float32 (float64 if an input is), and in x.dtype.

  Raises:
    ValueError: an argument has the wrong rank, size or dtype.
  """
  family = families.linear_recurrence_of(getattr(x, "ndim", 1) - 1)
  return _step(family, state, dict(x=x, log_a=log_a))


def _step(family: Family, state, arrays: Mapping[str, Any], scale=None, options=None):
  """Runs a family's problem on one token; `options` are the family's static ones, by name."""
  sizes, parts = family.check(arrays, state, one_token=True)
  number, traced = rows.factor(family, scale, sizes)
  static = number, tuple((options or {}).items())
  run = _kernel_of(family, arrays, parts, traced, options or {})
  o, parts = _compute(family, run, *static, dict(arrays), tuple(parts), traced)
  return parts[0] if len(parts) == 1 else parts, o


def _kernel_of(family: Family, arrays: Mapping[str, Any], parts, traced, options):
  """Returns what runs the step by a kernel; None where the equation runs, as on explicit meshes."""
  choose = KERNELS_OF_STEPS.get(family)
  if choose is None or explicit_mesh(arrays, parts) is not None:
    return None
  bare = lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))
  arrays, parts = jax.tree.map(bare, (dict(arrays), tuple(parts)))
  timed = jax.eval_shape(functools.partial(_with_time, family), arrays)
  return choose(Call(timed, parts, None, traced, options))


def _with_time(family: Family, arrays: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the arrays of one token with an axis T where the op's have it."""
  has_time = lambda name: "T" in family.arrays[name].split()
  return {n: x if x is None or not has_time(n) else x[:, None] for n, x in arrays.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _compute(
  family: Family, run: Callable | None, number: float | None, options: tuple, arrays, parts, traced
):
  def compute(arrays, parts, traced):
    scale = traced if number is None else number
    given = _with_time(family, arrays), parts, None, scale, dict(options), run is not None
    o, state = rows.solve(family, Call(*given), run or rows.by_tokens)
    return o[:, 0], state

  layouts = lambda arrays, parts, traced: rows.layouts(
    family, Call(arrays, parts, None), one_token=True
  )
  return on_automatic_axes(compute, layouts)(arrays, parts, traced)
