"""What rollouts are rewarded for: functions of a prompt and its completion, from 0 to 1."""

from __future__ import annotations

import ast
from collections.abc import Callable

import numpy as np

from clover_jax import api

Aim = Callable[[str, str], float]


def parses(prompt: str, completion: str) -> float:
    """Return the share of a completion's whole lines up to which the text parses as Python."""
    lines = completion.split("\n")[:-1]
    for count in range(len(lines), 0, -1):
        try:
            ast.parse(prompt + "\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
        return count / len(lines)
    return 0.0


def docstring(prompt: str, completion: str) -> float:
    """Return the share of three things that a completion begins with: a docstring of one line.

    Its quotes, a capital letter, and a full stop before the quotes that end it on the same line.
    """
    line = completion.lstrip().split("\n")[0].rstrip()
    opened = line.startswith('"""')
    closed = opened and line.endswith('."""') and len(line) > len('"""."""')
    return (opened + (opened and line[3:4].isupper()) + closed) / 3


AIMS: dict[str, Aim] = {"parses": parses, "docstring": docstring}


def rewards_of(aim: Aim, samples: api.Samples, prompts: list[str], tokenizer) -> np.ndarray:
    """Return the rewards [prompts, group] of samples."""
    drawn = zip(samples.tokens, samples.mask, strict=True)
    texts = [tokenizer.decode(ids[mask]) for ids, mask in drawn]
    group = len(texts) // len(prompts)
    rewards = [aim(prompts[i // group], text) for i, text in enumerate(texts)]
    return np.array(rewards, np.float32).reshape(-1, group)
