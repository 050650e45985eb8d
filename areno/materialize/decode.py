"""Token ids to text, equal to the tokenizer's own strings.

Byte-level BPE tokenizers (GPT-2's kind, and so Llama 3, Qwen, DeepSeek, SmolLM) decode by joining bytes, so one table of
each token's bytes and one gather replace the tokenizer's loop. Every other kind takes the library's path.
Axes: T tokens, N completions, V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]

from areno.materialize.rollout_batch import STOPPED, Int64, RolloutBatch

RewardText = Literal["no-eos", "raw", "no-special"]

# Tokens gathered at once: large enough to amortize the calls, small enough that the temporaries stay in cache.
_BLOCK_TOKENS = 1 << 17


class RowDecoder(Protocol):
    """Decodes rows of a flat id array."""

    def decode(self, tokens_T: npt.NDArray[np.int32], starts_N: Int64, stops_N: Int64) -> list[str]:
        """One string per row `tokens_T[start:stop]`."""
        ...


def make_decoder(tokenizer: Any, *, skip_special: bool) -> RowDecoder:
    """The fastest decoder that gives exactly this tokenizer's strings."""
    table = ByteTable.build(tokenizer, skip_special=skip_special)
    return table if table is not None else LibraryDecoder(tokenizer, skip_special=skip_special)


def completion_stops(rollout: RolloutBatch, end_token_ids: Collection[int], text: RewardText) -> Int64:
    """int64 [N]: where each completion's text ends. Under `no-eos` that is before the end token that ended it."""
    stops_N: Int64 = rollout.response_offsets_N1[1:]
    if text != "no-eos" or not end_token_ids or stops_N.size == 0 or rollout.num_response_tokens == 0:
        return stops_N
    ended_N = (rollout.finish_N == STOPPED) & (rollout.response_lens_N > 0)
    last_N = rollout.response_tokens_T[np.maximum(stops_N - 1, 0)]
    ended_N &= np.isin(last_N, np.fromiter(end_token_ids, dtype=np.int64))
    text_stops_N: Int64 = stops_N - ended_N
    return text_stops_N


def decode_completions(
    decoder: RowDecoder, rollout: RolloutBatch, end_token_ids: Collection[int], text: RewardText
) -> list[str]:
    """The text of each completion, as the reward sees it."""
    stops_N = completion_stops(rollout, end_token_ids, text)
    return decoder.decode(rollout.response_tokens_T, rollout.response_offsets_N1[:-1], stops_N)


class LibraryDecoder:
    """`batch_decode` of the tokenizer, or `decode` row by row where it has none."""

    def __init__(self, tokenizer: Any, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # A fast tokenizer used by two threads at once raises "Already borrowed".
        self._lock = threading.Lock()

    def decode(self, tokens_T: npt.NDArray[np.int32], starts_N: Int64, stops_N: Int64) -> list[str]:
        bounds = zip(starts_N.tolist(), stops_N.tolist(), strict=True)
        rows = [tokens_T[start:stop].tolist() for start, stop in bounds]
        if not rows:
            return []
        with self._lock:
            if hasattr(self._tokenizer, "batch_decode"):
                return list(self._tokenizer.batch_decode(rows, skip_special_tokens=self._skip_special))
            return [self._tokenizer.decode(row, skip_special_tokens=self._skip_special) for row in rows]


class ByteTable:
    """The bytes of every token of a byte-level BPE vocabulary, as an Arrow array: text is what its `take` puts end to end."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        # The empty entry behind the vocabulary stands for every id that it lacks.
        self._bytes_V1 = pa.array([*tokens, b""], type=pa.binary())

    @classmethod
    def build(cls, tokenizer: Any, *, skip_special: bool) -> ByteTable | None:
        """The table of this tokenizer, or None if its text is not a plain join of token bytes."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not _joins_bytes(tokenizer, backend):
            return None
        added = backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} if skip_special else set()
        size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        names = (None if i in special else backend.id_to_token(i) for i in range(size))
        table = cls([b"" if name is None else _token_bytes(name) for name in names])
        return table if table._agrees_with(backend, sorted(added), skip_special) else None

    def decode(self, tokens_T: npt.NDArray[np.int32], starts_N: Int64, stops_N: Int64) -> list[str]:
        texts: list[str] = []
        starts, stops = starts_N.tolist(), stops_N.tolist()
        first = 0
        while first < len(starts):
            last = first + 1
            while (
                last < len(starts) and stops[last] - starts[first] <= _BLOCK_TOKENS and stops[last - 1] <= starts[last]
            ):
                last += 1
            texts += self._decode_block(tokens_T, starts[first:last], stops[first:last])
            first = last
        return texts

    def _decode_block(self, tokens_T: npt.NDArray[np.int32], starts: list[int], stops: list[int]) -> list[str]:
        """Decode neighbouring rows with one gather over the tokens from the first row's start to the last one's stop."""
        base = starts[0]
        ids = np.minimum(tokens_T[base : stops[-1]], len(self._bytes_V1) - 1)
        _, edges_buffer, text = self._bytes_V1.take(pa.array(ids)).buffers()
        edges = np.frombuffer(edges_buffer, dtype=np.int32, count=ids.size + 1)
        begins, ends = edges[np.array(starts) - base].tolist(), edges[np.array(stops) - base].tolist()
        view = memoryview(text or b"")
        return [str(view[a:b], "utf-8", "replace") for a, b in zip(begins, ends, strict=True)]

    def _agrees_with(self, backend: Any, added: list[int], skip_special: bool) -> bool:
        """Compare with the library on random rows, added tokens mixed in: a guard against kinds not thought of."""
        rng = np.random.default_rng(0)
        rows = rng.integers(0, len(self._bytes_V1), size=(64, 16))
        if added:
            rows[:, ::4] = rng.choice(added, size=(64, 4))
        tokens_T = rows.reshape(-1).astype(np.int32)
        starts_N = np.arange(64, dtype=np.int64) * 16
        theirs = backend.decode_batch(rows.tolist(), skip_special_tokens=skip_special)
        return self.decode(tokens_T, starts_N, starts_N + 16) == list(theirs)


def _joins_bytes(tokenizer: Any, backend: Any) -> bool:
    """Whether decoding is nothing but ByteLevel: no clean-up of spaces, no decoder steps around it, no own `_decode`."""
    if backend.decoder is None:
        return False
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    if [step["type"] for step in steps] != ["ByteLevel"]:
        return False
    if type(backend.model).__name__ != "BPE":
        return False
    # transformers ignores clean_up_tokenization_spaces for BPE unless this second switch insists.
    if getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False):
        return False
    own = [getattr(type(tokenizer), name).__qualname__.split(".")[0] for name in ("decode", "_decode", "batch_decode")]
    return own == ["PreTrainedTokenizerBase", "TokenizersBackend", "PreTrainedTokenizerBase"]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, inverted: printable Latin-1 stands for itself, the rest is moved up."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [b for b in range(256) if b not in own]
    return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_OF_CHAR = _byte_of_char()


def _token_bytes(token: str) -> bytes:
    """What the ByteLevel decoder makes of one token: mapped bytes if every character is in the map, else its UTF-8."""
    mapped = [_BYTE_OF_CHAR.get(char, -1) for char in token]
    return token.encode("utf-8") if -1 in mapped else bytes(mapped)
