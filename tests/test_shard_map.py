"""Results and gradients under `jax.shard_map`, which checks what varies over a mesh; also of arrays
that all devices share.
"""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import lajax
from lajax.pallas.norm import gated_rms_norm
from lajax.pallas.short_conv import short_conv

T, D = 12, 16


def scaled(x, w):
  """x [.. D or 1] times w [D]."""
  return x * w.reshape((1,) * (x.ndim - 1) + w.shape)


# Functions of x [B T 1 D] and g [B T 1], of which each device has a part, and w [D], which all
# share.
OPS = {
  "linear_attention": lambda x, g, w, impl: lajax.linear_attention(
    x, scaled(x, w), x, g, impl=impl
  )[0],
  "linear_attention per channel": lambda x, g, w, impl: lajax.linear_attention(
    x, x, x, scaled(g[..., None], w**2), impl=impl
  )[0],
  "delta_rule": lambda x, g, w, impl: lajax.delta_rule(x, scaled(x, w), x, -g, g, impl=impl)[0],
  "dplr": lambda x, g, w, impl: lajax.dplr(x, x, x, -scaled(x, w), x, g, impl=impl)[0],
  "linear_recurrence": lambda x, g, w, impl: lajax.linear_recurrence(
    x[:, :, 0], -scaled(abs(x[:, :, 0]), w**2), impl=impl
  )[0],
  "attention": lambda x, g, w, impl: lajax.attention(x, scaled(x, w), x, impl=impl),
}
KERNELS = OPS | {
  "gated_rms_norm": lambda x, g, w, _: gated_rms_norm(x.reshape(-1, D), w, x.reshape(-1, D)),
  "short_conv": lambda x, g, w, _: short_conv(
    x[:, :, 0], jnp.repeat(w[:, None], 4, axis=1), w, jnp.zeros((x.shape[0], 3, D)), None
  )[0],
}


def gradients(f, sharded: bool):
  if sharded:
    spec = PartitionSpec("x")
    f = jax.shard_map(
      f,
      mesh=Mesh(np.array(jax.devices()[:1]), ("x",)),
      in_specs=(spec, spec, PartitionSpec()),
      out_specs=spec,
    )
  return jax.grad(lambda *args: (f(*args) ** 2).sum(), argnums=(0, 1, 2))


def arrays():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)
  return draw(2, T, 1, D), -abs(draw(2, T, 1)), draw(D)


@pytest.mark.parametrize("impl", ["recurrent", "chunked"])
@pytest.mark.parametrize("name", cases.some_fast(OPS, ("linear_attention",)))
def test_gradients_are_those_without_a_mesh(name, impl):
  f = lambda *args: OPS[name](*args, impl)
  got, want = (cases.quick_jit(gradients(f, sharded))(*arrays()) for sharded in (True, False))
  assert min(float(abs(x).max()) for x in want[::2]) > 1e-3
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_gradients_that_vary_as_their_arguments_do(name):
  """Only traced: tracing is where JAX compares the two.

  It cannot yet interpret a kernel under these checks.
  """
  f = lambda *args: KERNELS[name](*args, "pallas")
  found = jax.eval_shape(gradients(f, True), *arrays())
  assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in arrays()]
