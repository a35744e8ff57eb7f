"""Clover speculative decoding: draft heads that let a language model emit several tokens a step."""

__version__ = "0.1.0"
