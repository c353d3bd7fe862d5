"""New weights that arrive as rows, of which an engine copies the parts that it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rolepool.errors import DataError, first_few
from rolepool.weights.digests import Digest, Digests
from rolepool.weights.messages import as_matrix, part_of
from rolepool.weights.regions import Region
from rolepool.weights.rows import Exported


class RowStream:
    """Copies rows of weights into tensors, each of which is the part `held` of a weight.

    After an error the tensors contain a mixture of old and new weights.
    """

    def __init__(self, targets: Mapping[str, Tensor]) -> None:
        self._targets = targets
        self._held: dict[str, Region] = {}
        self._num_missing: dict[str, int] = {}
        """By name, the values that have not arrived."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._digests = Digests()

    @torch.no_grad()
    def take(self, exports: Sequence[Exported], held: Mapping[str, Region]) -> None:
        """Copy what several ranks export. `held` has the weights that begin with this call."""
        for name, region in held.items():
            if name in self._held:
                raise DataError(f"weights: {name} was sent twice")
            self._held[name] = region
            self._num_missing[name] = region.num_elements
        for exported in exports:
            for name, part in exported.items():
                self._shapes[name] = part.shape
                common = part.region.overlap(self._held[name])
                if common is None:
                    continue
                rows = part_of(part.rows, part.region, common)
                matrix = as_matrix(self._targets[name].detach())
                part_of(matrix, self._held[name], common).copy_(rows)
                self._num_missing[name] -= common.num_elements
                if matrix.dtype != rows.dtype:
                    # The digest is that of what has arrived.
                    self._digests.add_part(name, rows, common, part.shape, matrix.device)
                elif self._num_missing[name] == 0:
                    self._digests.add_part(name, matrix, self._held[name], part.shape)

    def end(self) -> dict[str, Digest]:
        """Check that all rows have arrived. Returns the digests of the parts."""
        arrived = {id(self._targets[name]) for name in self._held}
        missing = [name for name, target in self._targets.items() if id(target) not in arrived]
        missing += [name for name, count in self._num_missing.items() if count]
        if missing:
            raise DataError(
                f"weights: {len(missing)} of {len(self._targets)} are missing: "
                f"{first_few(missing, 5)}"
            )
        return self._digests.read()
