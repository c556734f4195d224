"""The order of documents: a seeded permutation of range(n) that is computed, not stored.

Invariant: `permuted(index, n, key)` maps range(n) onto itself, each value once, and depends on n and key alone.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

_ROUNDS = 6  # four make a balanced Feistel network indistinguishable from random; two more because they are cheap


def permuted(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """The images of `index`, values in range(n), under a pseudo-random permutation of range(n) in constant memory: a
    billion documents need no table.

    A Feistel network permutes range(2^(2b)), the smallest such range that holds range(n), b >= 1. If the image of a
    number is outside range(n), it is permuted again until it is inside ("cycle walking": Black and Rogaway, Ciphers
    with arbitrary finite domains, 2002). The larger range has less than 4n numbers, so that this takes fewer than four
    turns on average.

    Returns:
        int64 of the same shape.
    """
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(bits), np.uint64((1 << bits) - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")

    def turn(value: np.ndarray) -> np.ndarray:
        left, right = value >> half, value & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half) | right

    value = turn(index.astype(np.uint64))
    while (outside := value >= n).any():
        value[outside] = turn(value[outside])
    return value.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): each input bit reaches each output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_SMALL = 1 << 14  # up to this n, the permutations of the latest epochs are kept in memory


def epoch_order(n: int, seed: int, positions: np.ndarray) -> np.ndarray:
    """An endless order of n things: a permutation of all of them, then another one, and so on.

    Returns:
        The things at `positions`, int64 of the same shape. Position p is in epoch p // n.
    """
    epochs, places = np.divmod(positions, n)
    for epoch in np.unique(epochs).tolist():
        here, key = epochs == epoch, f"{seed} epoch {epoch}"
        places[here] = _whole(n, key)[places[here]] if n <= _SMALL else permuted(places[here], n, key)
    return places


@lru_cache(maxsize=32)
def _whole(n: int, key: str) -> np.ndarray:
    return permuted(np.arange(n), n, key)
