"""Conversations of tests."""

from clover_jax.data.records import Conversation


def conversation(source: str, pairs, **more) -> Conversation:
    """Return the record of (role, content) pairs."""
    messages = tuple({"role": role, "content": content} for role, content in pairs)
    return Conversation(source, messages, **more)
