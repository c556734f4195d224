"""Shuffling by a seeded permutation that is computed instead of stored."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

# Four rounds make a balanced Feistel network indistinguishable from random. Two more are cheap.
FEISTEL_ROUNDS = 6
MAX_TABLE_SIZE = 1 << 14  # permutations of at most this many items are cached


def permuted(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """Apply a pseudo-random permutation of range(n), chosen by `key`, to each integer in `index`.

    Each result is computed from its index alone, so shuffling a billion documents requires no table
    in memory.

    Args:
        index: Integers in range(n).
        n: Number of integers that the permutation maps.
        key: Seed of the permutation.

    Returns:
        int64 array of the same shape as `index`, with values in range(n).
    """
    # A Feistel network permutes range(4**half_bits). Use the smallest one that covers range(n), for
    # example range(256) if n is 100.
    num_bits = (n - 1).bit_length()
    half_bits = max(1, math.ceil(num_bits / 2))
    digest = hashlib.blake2b(key.encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8")
    values = _feistel(index.astype(np.uint64), half_bits, round_keys)

    # Permute values outside of range(n) again until they are inside. This "cycle walking" gives a
    # permutation of range(n) (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). It
    # takes at most four passes on average, because the larger range has at most 4n integers.
    while (is_outside := values >= n).any():
        values[is_outside] = _feistel(values[is_outside], half_bits, round_keys)
    return values.astype(np.int64)


def permutation(n: int, key: str) -> np.ndarray:
    """Return the pseudo-random permutation of range(n) for the seed `key`, as an int64 array."""
    return permuted(np.arange(n), n, key)


# Cached, so that reading a few items at a time does not compute the permutation again.
_cached_permutation = lru_cache(maxsize=32)(permutation)


def _feistel(values: np.ndarray, half_bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Permute range(4**half_bits) pseudo-randomly, with a Feistel network.

    Each round XORs a hash of one half of the bits into the other half, and swaps the halves.

    Args:
        values: Integers less than 4**half_bits, uint64.
        half_bits: Number of bits in each half of an integer.
        round_keys: One key per round, uint64.
    """
    shift = np.uint64(half_bits)
    mask = np.uint64((1 << half_bits) - 1)
    left = values >> shift
    right = values & mask
    for round_key in round_keys:
        hashed = _splitmix64(right ^ round_key) & mask
        left, right = right, left ^ hashed
    return (left << shift) | right


def epoch_order(n: int, seed: int, positions: np.ndarray) -> np.ndarray:
    """Return the items at `positions` in an endless shuffled order of n items.

    The order consists of epochs, each a different permutation of all n items. For example, if the
    first two epochs of 3 items are 2, 0, 1 and 1, 2, 0, position 4 holds item 2.

    Args:
        n: Number of items.
        seed: Seed of the order.
        positions: Integers, 0 or greater.

    Returns:
        int64 array of the same shape as `positions`, with values in range(n).
    """
    epochs, indices = np.divmod(positions, n)  # index within the epoch
    items = np.empty_like(indices)
    for epoch in np.unique(epochs).tolist():
        is_in_epoch = epochs == epoch
        key = f"{seed} epoch {epoch}"
        # Both branches compute the same permutation. A table is faster, but takes memory.
        if n <= MAX_TABLE_SIZE:
            items[is_in_epoch] = _cached_permutation(n, key)[indices[is_in_epoch]]
        else:
            items[is_in_epoch] = permuted(indices[is_in_epoch], n, key)
    return items


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Hash uint64 values with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
