"""On a GPU `impl="auto"` means the kernels, if they take the arguments."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import lajax
import lajax.layers as L
from lajax.pallas import launch
from lajax.pallas.model import kernel_names

B, T, H, K = 1, 20, 2, 8
x, gate = jnp.ones((B, T, H, K)), -jnp.ones((B, T, H))
CALLS = {
  "linear_attention": lambda x, g, **options: lajax.linear_attention(x, x, x, g, **options),
  "normalized_linear_attention": lambda x, g, **options: lajax.normalized_linear_attention(x, x, x, g, **options),
  "delta_rule": lambda x, g, **options: lajax.delta_rule(x, x, x, jnp.exp(g), g, **options),
  "dplr": lambda x, g, **options: lajax.dplr(x, x, x, x, x, g, **options),
  "linear_recurrence": lambda x, g, **options: lajax.linear_recurrence(x, -x, **options),
  "attention": lambda x, g, **options: lajax.attention(x, x, x, **options),
}  # fmt: skip


def has_kernels(f, *args) -> bool:
  # A new function each time, since JAX keeps traces of functions.
  return bool(kernel_names(lambda *args: f(*args), *args))


@pytest.fixture
def gpu(monkeypatch):
  monkeypatch.setattr(launch, "_on_supported_gpu", lambda: True)


@pytest.mark.parametrize("op", CALLS)
def test_kernels_only_on_a_gpu(op, monkeypatch):
  assert not has_kernels(CALLS[op], x, gate)
  monkeypatch.setattr(launch, "_on_supported_gpu", lambda: True)
  assert has_kernels(CALLS[op], x, gate)
  assert not has_kernels(lambda x, g: CALLS[op](x, g, impl="recurrent"), x, gate)


@pytest.mark.usefixtures("gpu")
def test_what_kernels_do_not_take_is_chunked():
  assert not has_kernels(lambda x: lajax.linear_recurrence(x, -x), x[:, :1])  # of one token
  assert not has_kernels(lambda x, g: lajax.attention(x, x, x, log_forget=g), x, gate)
  assert not has_kernels(lambda x: lajax.linear_attention(x, x, x), jnp.ones((B, T, H, 300)))


@pytest.mark.usefixtures("gpu")
def test_attention_of_half_precision_is_that_of_cudnn(monkeypatch):
  asked = []
  monkeypatch.setattr(
    jax.nn, "dot_product_attention", lambda q, k, v, **options: asked.append(options) or q
  )
  half = x.astype(jnp.bfloat16)
  lajax.attention(half, half, half)
  assert asked == [{"scale": K**-0.5, "is_causal": True, "implementation": "cudnn"}]
  assert has_kernels(lambda x: lajax.attention(x, x, x, window=3), half)
  assert len(asked) == 1


@pytest.mark.usefixtures("gpu")
def test_layers_take_the_kernels_of_convolution_and_norm():
  layer = L.GatedDeltaNet(16, 1, 8, rngs=nnx.Rngs(0))
  found = kernel_names(lambda x: layer(x)[0], jnp.ones((1, 20, 16)))
  assert {"conv_forward", "norm_forward", "delta_solve"} <= set(found)


@pytest.mark.parametrize(
  ("backend", "version", "taken"),
  [
    ("gpu", "8.0", True),
    ("gpu", "12.0", True),
    ("gpu", "7.5", False),
    ("gpu", "gfx942", False),
    ("cpu", "9.0", False),
  ],
)
def test_which_devices(backend, version, taken, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(compute_capability=version)])
  assert launch.wanted("auto") == taken
  assert launch.wanted("pallas")
  assert not launch.wanted("chunked")
