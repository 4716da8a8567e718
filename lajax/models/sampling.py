"""Choice of the next token from logits: greedy, temperature, top-k, top-p and min-p."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lajax._numerics import promoted
from lajax._shapes import check, check_given

Number = float | int | Array  # without axes; traced or not


def sample(
  key: Array | None,
  logits: Float[Array, "V"],
  *,
  temperature: Number | None = None,
  top_k: Number | None = None,
  top_p: Number | None = None,
  min_p: Number | None = None,
) -> Int[Array, ""]:
  """Next token of one row, chosen from its logits. `jax.vmap` maps it over rows and their options.

      p = softmax(logits / temperature)

  The token is drawn from p, restricted to the tokens that pass every filter, in this order:

  * `top_k`: the k most likely tokens.
  * `top_p`: of these, the fewest most likely tokens whose probabilities sum to top_p or more.
  * `min_p`: of these, the tokens with a probability of at least min_p times the largest.

  The most likely token passes every filter. Of equally likely tokens, the one of the smaller number
  counts as more likely. So top_k=1 gives the same token as temperature=0. All numbers are computed
  in float32 at least.

  An option that is None is left out of the program: without `top_k` and `top_p` nothing is sorted.
  Options may be traced, so one program serves requests with different options; these values have no
  effect: `top_k` of V or more, `top_p=1.0`, `min_p=0.0`.

  Args:
    key: one random key; None will do where `temperature` is None.
    logits: [V]. A token of -inf is never chosen. Tokens of +inf share all the probability.
    temperature: at least 0; 0 or None for the most likely token.
    top_k: a whole number of at least 1.
    top_p: in (0, 1].
    min_p: in [0, 1].

  Returns:
    int32: the token; -1 if a logit is NaN, or if all are -inf.

  Raises:
    ValueError: `logits` is not a float [V], or `key` is missing.

  Paper: A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, arXiv:1904.09751,
  section 3.1 (top-p); M. Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2025,
  arXiv:2407.01082, section 3.
  """
  check_given(logits=(logits, "V"))
  check(logits=(logits, "V", "float"))
  logits = jnp.asarray(logits)
  logits = logits.astype(promoted(logits.dtype, jnp.float32))
  largest = logits.max()  # NaN if a logit is NaN
  possible = largest > -jnp.inf
  best = jnp.argmax(logits).astype(jnp.int32)
  if temperature is None:
    return jnp.where(possible, best, -1)
  if key is None:
    raise ValueError("`key` must be a JAX random key where `temperature` is given; got None.")
  wide = lambda x: jnp.asarray(x).astype(logits.dtype)
  temperature = wide(temperature)
  is_greedy = temperature == 0
  # The largest is subtracted first: a small temperature then gives 0 and -inf, never inf - inf.
  below = jnp.where(logits == largest, jnp.zeros_like(logits), logits - largest)
  scaled = below / jnp.where(is_greedy, jnp.ones_like(temperature), temperature)
  if top_k is not None or top_p is not None:
    kept = _most_likely(scaled, top_k, None if top_p is None else wide(top_p))
    scaled = jnp.where(kept, scaled, -jnp.inf)
  if min_p is not None:
    scaled = jnp.where(scaled >= jnp.log(wide(min_p)), scaled, -jnp.inf)
  noise = jax.random.gumbel(key, scaled.shape, scaled.dtype)
  drawn = jnp.argmax(scaled + noise).astype(jnp.int32)
  return jnp.where(possible, jnp.where(is_greedy, best, drawn), -1)


def _most_likely(scaled: Float[Array, "V"], top_k, top_p):
  """Marks the tokens that pass top_k and top_p."""
  order = jnp.argsort(scaled, descending=True, stable=True)
  kept = jnp.ones(scaled.shape, bool)
  if top_k is not None:
    kept = jnp.arange(scaled.size, dtype=jnp.int32) < jnp.asarray(top_k).astype(jnp.int32)
  if top_p is not None:
    p = jax.nn.softmax(jnp.where(kept, scaled[order], -jnp.inf))
    before = jnp.cumsum(p) - p
    # The sum of rounded numbers may reach 1 before the last token: top_p = 1 keeps all.
    kept &= (before < top_p) | (top_p >= 1)
    kept = kept.at[0].set(True)
  return jnp.zeros(scaled.shape, bool).at[order].set(kept)
