"""Rows that begin alike share their beginning: the samples of a prompt need its tokens in a forward pass only once.

A row's hidden states depend on its own tokens alone, so equal beginnings have equal states, and what the rows' losses say
about them adds up in the backward pass. Only the order of float sums differs.
Axes: B rows, S tokens of the concatenated rows, U tokens that are left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

MIN_SHARED = 8
"""A shorter common beginning (a template's first words) is not worth a segment of its own."""


@dataclass(frozen=True)
class SharedLayout:
    """Groups of rows, each as its first row and, of every other one, what follows the common beginning.

    kept_U   int64 [U]  positions in S that are laid down; their position ids are those they had in their rows, so that a
                        segment which begins at position p > 0 continues the first p tokens of the row before it that
                        begins at 0
    place_S  int64 [S]  where in U the state of each token is
    """

    kept_U: Int64
    place_S: Int64


def share_prefixes(tokens_S: npt.NDArray[np.integer], offsets_B1: npt.NDArray[np.integer]) -> SharedLayout:
    """Find runs of rows with a common beginning. A row joins a run if more tokens are saved with it than without."""
    offsets = offsets_B1.tolist()
    kept: list[Int64] = []
    place_S = np.empty(tokens_S.size, dtype=np.int64)
    size = 0
    first = 0
    while first < len(offsets) - 1:
        last, shared = _run(tokens_S, offsets, first)
        root = size
        for row in range(first, last):
            skip = shared if row > first else 0
            start, stop = offsets[row], offsets[row + 1]
            kept.append(np.arange(start + skip, stop, dtype=np.int64))
            place_S[start : start + skip] = np.arange(root, root + skip)
            place_S[start + skip : stop] = np.arange(size, size + stop - start - skip)
            size += stop - start - skip
        first = last
    return SharedLayout(np.concatenate(kept) if kept else np.zeros(0, dtype=np.int64), place_S)


def _run(tokens_S: npt.NDArray[np.integer], offsets: list[int], first: int) -> tuple[int, int]:
    """End of the run that begins with row `first`, and the length of the beginning that its rows share."""
    leader = tokens_S[offsets[first] : offsets[first + 1]]
    shared, last = leader.size, first + 1
    while last < len(offsets) - 1:
        common = _common(leader[:shared], tokens_S[offsets[last] : offsets[last + 1]])
        others = last - first  # rows that share, beside the leader, if this one joins
        if common < MIN_SHARED or others * common <= (others - 1) * shared:
            break
        shared, last = common, last + 1
    return last, shared


def _common(a: npt.NDArray[np.integer], b: npt.NDArray[np.integer]) -> int:
    """Length of the common beginning."""
    size = min(a.size, b.size)
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
