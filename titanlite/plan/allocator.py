"""Simulate the CUDA caching allocator of torch to predict how many bytes it reserves.

Because of fragmentation, torch reserves more GPU memory than its tensors use. The simulation
follows c10/cuda/CUDACachingAllocator.cpp with expandable segments, which the launcher enables. Each
CUDA stream has one segment for small blocks and one for large blocks. An allocation takes the
smallest free block that is large enough, and the remainder of that block stays free. If no free
block is large enough, the segment grows by whole pages. Segments never shrink, so holes between
long-lived blocks are lost to fragmentation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable

MIB = 2**20
MAX_SMALL_BLOCK = MIB  # larger blocks are allocated in the segment for large blocks
SMALL_PAGE = 2 * MIB
LARGE_PAGE = 20 * MIB
ROUNDING = 512  # block sizes are multiples of this
NEVER_FREED = "never freed"  # owner of blocks that `CachingAllocator.free` never frees
CUBLAS = "cuBLAS"  # owner of the cuBLAS workspaces
CUBLAS_WORKSPACES = 33 * MIB  # on an H100, allocated by the first matmul and never freed


class CachingAllocator:
    """Simulates the CUDA caching allocator of one GPU to predict how much memory it reserves.

    Each block belongs to an owner, such as a storage.
    """

    def __init__(self) -> None:
        """Create an allocator that has reserved nothing."""
        # (stream, whether the blocks are small) -> segment
        self._segments: dict[tuple[int, bool], ReservedSegment] = {}
        # Owner -> (segment, address, size in bytes) of its blocks
        self._blocks = defaultdict[Hashable, list[tuple[ReservedSegment, int, int]]](list)

    @property
    def reserved(self) -> int:
        """Number of reserved bytes, which never decreases."""
        return sum(segment.size for segment in self._segments.values())

    def holds(self, owner: Hashable) -> bool:
        """Return whether `owner` has a block."""
        return bool(self._blocks[owner])

    def allocate(self, owner: Hashable, size: int, stream: int) -> None:
        """Allocate a block of simulated GPU memory.

        Args:
            owner: Storage that uses the block. It may have several blocks.
            size: Number of bytes.
            stream: Index of the CUDA stream. Streams never share memory.
        """
        size = math.ceil(size / ROUNDING) * ROUNDING
        is_small = size <= MAX_SMALL_BLOCK
        page = SMALL_PAGE if is_small else LARGE_PAGE
        segment = self._segments.setdefault((stream, is_small), ReservedSegment(page))
        self._blocks[owner].append((segment, segment.allocate(size), size))

    def free(self, owner: Hashable) -> None:
        """Free the oldest block of `owner`."""
        segment, address, size = self._blocks[owner].pop(0)
        segment.free(address, size)

    def run_matmul(self) -> None:
        """Simulate a matmul. The first one allocates cuBLAS workspaces, which are never freed."""
        if not self.holds(CUBLAS):
            self.allocate(CUBLAS, CUBLAS_WORKSPACES, stream=0)


class ReservedSegment:
    """Simulates an expandable segment, a range of addresses from 0 that grows by whole pages.

    Attributes:
        size: Number of reserved bytes.
    """

    def __init__(self, page: int) -> None:
        """Create an empty segment that grows by multiples of `page` bytes."""
        self.size = 0
        self._page = page
        self._size_at: dict[int, int] = {}  # address of a free block -> its size
        self._start_of: dict[int, int] = {}  # end of a free block -> its address

    def allocate(self, size: int) -> int:
        """Allocate a block of `size` bytes and return its address.

        Grow the segment if no free block is large enough.
        """
        address = self._best_fit(size)
        if address is None:
            address = self._grow(size)
        remainder = self._remove(address) - size
        if remainder:
            self._insert(address + size, remainder)
        return address

    def free(self, address: int, size: int) -> None:
        """Free a block of `size` bytes at `address` and merge it with adjacent free blocks."""
        if address in self._start_of:
            left = self._start_of[address]
            size += self._remove(left)
            address = left
        if address + size in self._size_at:
            size += self._remove(address + size)
        self._insert(address, size)

    def _best_fit(self, size: int) -> int | None:
        """Find the smallest free block with at least `size` bytes.

        The last block of the segment can grow, so it is used only if no other block fits.

        Returns:
            Address of the block, or None if no block is large enough.
        """
        candidates: list[tuple[bool, int, int]] = []  # whether it is the last block, size, address
        for address, free_size in self._size_at.items():
            if free_size >= size:
                is_last = address + free_size == self.size
                candidates.append((is_last, free_size, address))
        return min(candidates)[-1] if candidates else None

    def _grow(self, size: int) -> int:
        """Reserve pages until the segment ends with a free block of at least `size` bytes.

        For example, if the last 15 MiB are free, a block of 50 MiB needs two pages of 20 MiB, and
        the free block at the end then has 55 MiB.

        Returns:
            Address of the free block at the end.
        """
        end = self.size
        address = self._start_of.get(end, end)
        free_bytes = end - address  # at the end of the segment
        num_pages = math.ceil((size - free_bytes) / self._page)
        num_bytes = num_pages * self._page
        self.size += num_bytes
        self.free(end, num_bytes)  # also merges the pages with a free block before them
        return address

    def _insert(self, address: int, size: int) -> None:
        """Register `size` bytes at `address` as a free block."""
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _remove(self, address: int) -> int:
        """Unregister the free block at `address` and return its size in bytes."""
        size = self._size_at.pop(address)
        del self._start_of[address + size]
        return size
