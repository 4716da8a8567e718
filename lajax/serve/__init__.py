"""Serving: many requests on one device, each with the very tokens that it would get alone."""

from lajax.serve.engine import Engine
from lajax.serve.handle import Handle, Stats

__all__ = ["Engine", "Handle", "Stats"]
