"""Drivers under JAX's transformations: `jax.grad` takes a given pullback, `vmap` a longer batch.

`jax.custom_vjp` would forbid forward mode. Here the tangent of a function is a linear map with two
directions: forwards it is the derivative that JAX finds, transposed it is the given pullback.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

linear_map_p = Primitive("lajax_linear_map")
linear_map_p.multiple_results = True


def differentiable(forward: Callable, plain: Callable, pullback: Callable) -> Callable:
  """Returns a function (inputs, constants) -> outputs of pytrees, differentiable in its inputs.

  Args:
    forward: (inputs, constants) -> (outputs, residuals).
    plain: (inputs, constants) -> outputs, of operations that JAX can differentiate forwards.
    pullback: (inputs, constants, residuals, cotangents of outputs) -> cotangents of inputs.
  """

  @jax.custom_jvp
  def f(inputs, constants):
    return forward(inputs, constants)[0]

  @f.defjvp
  def f_jvp(primals, tangents):
    inputs, constants = jax.tree.map(_once, primals[0]), primals[1]
    outputs, residuals = forward(inputs, constants)
    push = lambda known, t: jax.jvp(lambda x: plain(x, known[1]), (known[0],), (t,))[1]
    pull = lambda known, ct: pullback(*known, ct)
    return outputs, linear_map(push, pull, (inputs, constants, residuals), tangents[0], outputs)

  return f


def linear_map(push, pull, known, tangents, outputs):
  """Applies the linear map t -> push(known, t), whose transpose is ct -> pull(known, ct)."""
  known_leaves, known_tree = jax.tree.flatten(known)
  tangent_leaves, tangent_tree = jax.tree.flatten(tangents)
  output_leaves, output_tree = jax.tree.flatten(outputs)

  def flat(function, tree):
    def call(*args):
      known = jax.tree.unflatten(known_tree, args[: len(known_leaves)])
      return jax.tree.leaves(function(known, jax.tree.unflatten(tree, args[len(known_leaves) :])))

    return call

  out = linear_map_p.bind(
    *known_leaves,
    *tangent_leaves,
    push=flat(push, tangent_tree),
    pull=flat(pull, output_tree),
    known=len(known_leaves),
    results=tuple(map(jax.typeof, output_leaves)),
  )
  return jax.tree.unflatten(output_tree, out)


@linear_map_p.def_impl
def _impl(*args, push, pull, known, results):
  return push(*args)


@linear_map_p.def_abstract_eval
def _abstract_eval(*avals, push, pull, known, results):
  """Returns the types of the results; if they are not known, `push` is traced to find them."""
  return jax.make_jaxpr(push)(*avals).out_avals if results is None else results


def _jvp(primals, tangents, *, push, pull, known, results):
  bind = functools.partial(linear_map_p.bind, push=push, pull=pull, known=known, results=results)
  moving = map(ad.instantiate_zeros, tangents[known:])
  return bind(*primals), bind(*primals[:known], *moving)


@jax.custom_jvp
def _once(x):
  """Returns x, and refuses a second derivative: the pullback has none."""
  return x


@_once.defjvp
def _once_jvp(primals, tangents):
  raise NotImplementedError(
    "impl='chunked' has first derivatives only, and a second one was asked for; use "
    "impl='recurrent' or impl='associative'."
  )


def _transpose(cotangents, *args, push, pull, known, results):
  cotangents = map(ad.instantiate_zeros, cotangents)
  moving = tuple(x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in args[known:])
  found = linear_map_p.bind(
    *args[:known], *cotangents, push=pull, pull=push, known=known, results=moving
  )
  wanted = [
    x if ad.is_undefined_primal(arg) else None for arg, x in zip(args[known:], found, strict=True)
  ]
  return [None] * known + wanted


def _batch(args, dims, *, push, pull, known, results):
  size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
  along = [0 if d is not None else None for d in dims[:known]]
  args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
  moving = [
    jnp.broadcast_to(x, (size, *x.shape)) if d is None else x
    for x, d in zip(args[known:], dims[known:], strict=True)
  ]

  def mapped(function):
    def call(*args):
      return jax.vmap(function, in_axes=(*along, *(0,) * (len(args) - known)), axis_size=size)(
        *args
      )

    return call

  out = linear_map_p.bind(
    *args[:known], *moving, push=mapped(push), pull=mapped(pull), known=known, results=None
  )
  return out, [0] * len(out)


ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
mlir.register_lowering(
  linear_map_p,
  mlir.lower_fun(lambda *args, push, pull, known, results: push(*args), multiple_results=True),
)


def join_batches(f: Callable, in_axes, out_axes) -> Callable:
  """Returns f, whose `jax.vmap` is f itself on a longer batch axis.

  So no transformation adds an axis to the products of matrices.

  Args:
    f: a function of pytrees of arrays that treats every entry along the batch axes in one way.
    in_axes, out_axes: the batch axis of each argument and result, as prefixes of their pytrees.
  """
  g = custom_vmap(f)

  @g.def_vmap
  def batched(size, is_batched, *args):
    def joined(x, given, axis):
      x = (
        jnp.moveaxis(x, 0, axis)
        if given
        else jnp.broadcast_to(jnp.expand_dims(x, axis), _inserted(x.shape, size, axis))
      )
      return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def parted(x, axis):
      return jnp.moveaxis(x.reshape(*x.shape[:axis], size, -1, *x.shape[axis + 1 :]), axis, 0)

    over = lambda f, axes, *trees: jax.tree.map(
      lambda a, *t: jax.tree.map(lambda *x: f(*x, a), *t), axes, *trees
    )
    out = over(parted, out_axes, g(*over(joined, in_axes, args, tuple(is_batched))))
    return out, jax.tree.map(lambda _: True, out)

  return g


def _inserted(shape, size: int, axis: int):
  return (*shape[:axis], size, *shape[axis:])
