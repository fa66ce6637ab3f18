"""Windows cut out of a token stream, many at a time, with no loop over rows."""

from __future__ import annotations

import numpy as np

from train.data.streams import TokenStream

HostBatch = dict[str, np.ndarray]


class Windows:
    """The windows of a stream, which is a circle: its last separator is its first.

    So a window may begin anywhere, and none is cut short at the end.

    Attributes:
      length: Tokens in a window, T.
      targets: Tokens to predict in the stream, which is how far around the circle is.
    """

    def __init__(self, stream: TokenStream, window_length: int, *, document_masking: bool):
        self.window_length = window_length
        self.num_targets = stream.num_targets
        self._tokens = np.asarray(stream.tokens)  # indexing the memmap itself is slower
        self._segments = document_masking
        starts = np.asarray(stream.document_starts)
        # Those that a window can reach beyond the end stand there once more.
        self._starts = np.concatenate([starts, starts[starts < window_length] + self.num_targets])

    def cut(
        self,
        starts: np.ndarray,  # [B] int64, places in the stream
    ) -> HostBatch:
        """The windows that begin at these places, T tokens each.

        Returns:
          tokens: [B, T] int32.
          targets: [B, T] int32, the token after each of them.
          segments: [B, T] int32, the number of the document within the window, from 1 on; a
            window's first document may have begun before it. All 1 without segments.
          positions: [B, T] int32, places within the document, or from the window's beginning if
            the document began before it. Places within the window without segments.
        """
        places = starts[:, None] + np.arange(self.window_length + 1)  # [B, T + 1]
        tokens = self._tokens[places % self.num_targets].astype(np.int32)
        segments, positions = self._number(places[:, :-1])
        return {
            "tokens": np.ascontiguousarray(tokens[:, :-1]),
            "targets": np.ascontiguousarray(tokens[:, 1:]),
            "segments": segments,
            "positions": positions,
        }

    def _number(
        self,
        places: np.ndarray,  # [B, T]
    ) -> tuple[np.ndarray, np.ndarray]:
        first = places[:, :1]
        if not self._segments:
            positions = (places - first).astype(np.int32)
            return np.ones_like(positions), positions
        document = np.searchsorted(self._starts, places, side="right")  # [B, T], from 1 on
        segments = document - document[:, :1] + 1
        positions = places - np.maximum(self._starts[document - 1], first)
        return segments.astype(np.int32), positions.astype(np.int32)
