"""Clover speculative decoding: draft heads that let a language model emit several tokens a step.

`from clover_jax import api` is for notebooks and programs. This module imports nothing.
"""

__version__ = "0.2.0"
