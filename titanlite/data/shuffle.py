"""The order of documents: a seeded permutation of range(n) that is computed, not stored.

Invariant: `Permutation(n, key)` maps range(n) onto itself, each value once, and depends on n and key alone.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

_ROUNDS = 6  # four make a balanced Feistel network indistinguishable from random; two more because they are cheap


class Permutation:
    """A pseudo-random permutation of range(n) in constant memory: a billion documents need no table.

    A Feistel network permutes range(2^(2b)), the smallest such range that holds range(n), b >= 1. If the image of a
    number is outside range(n), it is permuted again until it is inside ("cycle walking": Black and Rogaway, Ciphers
    with arbitrary finite domains, 2002). The larger range has less than 4n numbers, so that this takes fewer than four
    turns on average.
    """

    def __init__(self, n: int, key: str) -> None:
        assert n > 0
        self.n = n
        half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest(), dtype="<u8")

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Images of `index`, an integer array with values in range(n); int64 of the same shape."""
        value = self._turn(index.astype(np.uint64))
        while (outside := value >= self.n).any():
            value[outside] = self._turn(value[outside])
        return value.astype(np.int64)

    def _turn(self, value: np.ndarray) -> np.ndarray:
        left, right = value >> self._half, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right


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
        places[here] = _whole(n, key)[places[here]] if n <= _SMALL else Permutation(n, key)(places[here])
    return places


@lru_cache(maxsize=32)
def _whole(n: int, key: str) -> np.ndarray:
    return Permutation(n, key)(np.arange(n))
