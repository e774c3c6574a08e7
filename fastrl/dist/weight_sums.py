"""The sender's checksums of an update, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastrl.dist.weight_checksum import partial_checksum
from fastrl.dist.weight_plan import Bucket, Piece, TensorSpec
from fastrl.dist.weight_timeline import Timeline


class Sums:
    """The checksum of each tensor, put together from those of its pieces."""

    def __init__(self, specs: Sequence[TensorSpec], timeline: Timeline) -> None:
        self.specs, self.timeline = specs, timeline
        self.by_index: dict[int, Tensor] = {}
        self.bucket: Bucket = ()
        self.number = 0

    def begin(self, number: int, bucket: Bucket) -> None:
        """What comes now are the pieces of this bucket."""
        self.number, self.bucket = number, bucket

    def add(self, i: int, data: Tensor) -> None:
        """Piece i of the bucket holds these bytes."""
        with self.timeline.span("checksum", self.number):
            piece = self.bucket[i]
            part = partial_checksum(data, piece.start * self._itemsize(piece))
            known = self.by_index.get(piece.index)
            self.by_index[piece.index] = part if known is None else known + part

    def add_all(self, room: Tensor) -> None:
        """Every piece of the bucket."""
        for i, piece in enumerate(self.bucket):
            self.add(i, room[piece.offset : piece.offset + piece.count * self._itemsize(piece)])

    def _itemsize(self, piece: Piece) -> int:
        dtype = self.specs[piece.index].dtype
        assert dtype is not None
        return dtype.itemsize
