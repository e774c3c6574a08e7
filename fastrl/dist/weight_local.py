"""A delivery inside one process: the engine reads the tensors one by one, nothing is staged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fastrl.dist.weight_checksum import partial_checksum
from fastrl.dist.weight_plan import SMALL, Bucket, Part, Piece, TensorSpec, compare_manifests, names_by_tensor
from fastrl.errors import WeightError


class LocalReceiver:
    """One update as the engine of the same process sees it; the methods are those of `WeightReceiver`."""

    def __init__(
        self, version: int, specs: Sequence[TensorSpec], walk: Iterator[tuple[Bucket, list[Part]]], verify: bool
    ) -> None:
        self.version, self.manifest, self.verify, self.walk = version, list(specs), verify, walk
        self.names = names_by_tensor(specs)
        self.checksums: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.ready = self.finished = False
        self._sums: list[tuple[str, Tensor, Tensor]] = []  # name, as given, as it was when the engine had read it

    def check_manifest(self, expected: Iterable[TensorSpec]) -> None:
        """Compare what is coming with what the engine expects; raises WeightError when they differ."""
        problem = compare_manifests(self.manifest, expected)
        if problem is not None:
            raise WeightError(f"update to version {self.version} refused: {problem}")
        self.ready = True

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the update, each valid until the loop advances."""
        if not self.ready:
            raise WeightError("tensors() needs check_manifest() before it")
        for bucket, parts in self.walk:
            for piece, (runs, dtype, _) in zip(bucket, parts, strict=True):
                flat = runs[0] if len(runs) == 1 else torch.cat(runs)
                yield from self._tensor(self.manifest[piece.index], flat.to(dtype).contiguous())
        for name, given, seen in self._sums:
            self.sent[name], self.checksums[name] = int(given) % 2**64, int(seen) % 2**64
        self.finished = True

    def _tensor(self, spec: TensorSpec, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        data = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
        given = partial_checksum(data) if self.verify else None
        for name in self.names[spec.name]:
            yield name, flat.view(spec.shape)
        if given is not None:
            self._sums.append((spec.name, given, partial_checksum(data)))

    def fail(self, why: str) -> None:
        """End the update with a reason."""
        raise WeightError(f"the engine could not load the update: {why}")


def whole_tensors(specs: Sequence[TensorSpec], together: int = SMALL) -> list[Bucket]:
    """A plan of whole tensors, gathered together up to about `together` bytes."""
    buckets: list[Bucket] = []
    size = 0
    for i, spec in enumerate(specs):
        if spec.same_as is None:
            piece, first = Piece(i, 0, spec.numel, 0), not buckets or size + spec.num_bytes > together
            buckets = [*buckets, (piece,)] if first else [*buckets[:-1], (*buckets[-1], piece)]
            size = spec.num_bytes if first else size + spec.num_bytes
    return buckets
