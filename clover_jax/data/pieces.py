"""Where a sample is cut, and which of its pieces teach something."""

import numpy as np


def learnable_pieces(loss_mask: np.ndarray, seq_len: int) -> list[slice]:
    """Return the pieces, of at most `seq_len` tokens, that have a pair to learn from.

    Example: 5 tokens that all count, with seq_len 2, give pieces of 2 and 2: the last token alone
    has no pair.
    """
    pieces = [slice(at, at + seq_len) for at in range(0, len(loss_mask), seq_len)]
    # The mask of a piece's last token never counts: its target lies beyond.
    return [piece for piece in pieces if loss_mask[piece][:-1].any()]
