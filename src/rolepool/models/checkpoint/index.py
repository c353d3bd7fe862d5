"""What the ranks of a pool saved of one role: an index in JSON for each rank.

Owns the names of the files, what an index holds, and whether everything it names is there. Opens no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from rolepool.errors import ConfigError
from rolepool.models.checkpoint.rng import RngStates

Kind = Literal["model", "optimizer"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rows(_Frozen):
    """Rows `start` to `stop` of a tensor of this whole shape. A tensor without dimensions is one row."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


class ShardFile(_Frozen):
    """A safetensors file: its size, and what is in it."""

    num_bytes: int
    tensors: dict[str, Rows]


class RankIndex(_Frozen):
    """What one rank saved."""

    format: Literal[1] = 1
    rank: int
    num_ranks: int
    num_updates: int
    rng: RngStates
    model: dict[str, ShardFile]
    optimizer: dict[str, ShardFile]

    def files(self, kind: Kind) -> Mapping[str, ShardFile]:
        return self.model if kind == "model" else self.optimizer


class Part(NamedTuple):
    """Rows of a tensor, and the file they are in."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class SavedTensor:
    """A tensor put together of rows in files."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class SavedRole:
    """All that was saved of a role: the indices of its ranks, which agree and name files of the right size."""

    folder: Path
    ranks: tuple[RankIndex, ...]

    @property
    def num_updates(self) -> int:
        return self.ranks[0].num_updates

    def files(self, kind: Kind) -> Iterator[tuple[Path, ShardFile]]:
        for index in self.ranks:
            for name, file in index.files(kind).items():
                yield self.folder / name, file

    def tensors(self, kind: Kind) -> dict[str, SavedTensor]:
        """Every tensor by name. One with rows missing, or there twice, is an error."""
        found: dict[str, SavedTensor] = {}
        for path, file in self.files(kind):
            for name, rows in file.tensors.items():
                before = found.get(name, SavedTensor(rows.shape, rows.dtype, ()))
                if (before.shape, before.dtype) != (rows.shape, rows.dtype):
                    raise ConfigError(f"{path}: {name} has another shape or dtype than in {before.parts[0].file}")
                part = Part(rows.start, rows.stop, path.name)
                found[name] = SavedTensor(rows.shape, rows.dtype, (*before.parts, part))
        for name, tensor in found.items():
            self._check_covered(name, tensor)
        return found

    def _check_covered(self, name: str, tensor: SavedTensor) -> None:
        reached, num_rows = 0, num_rows_of(tensor.shape)
        for part in sorted(tensor.parts):
            if part.start != reached:
                path = self.folder / part.file
                raise ConfigError(f"{path}: {name} is saved to row {reached}, and then from row {part.start}")
            reached = part.stop
        if reached != num_rows:
            raise ConfigError(f"{self.folder}: {name} is saved to row {reached} of {num_rows}")


def num_rows_of(shape: tuple[int, ...]) -> int:
    """Rows on the first dimension."""
    return shape[0] if shape else 1


def rank_name(rank: int, num_ranks: int) -> str:
    """What a rank calls its files."""
    return f"rank_{rank:05d}_of_{num_ranks:05d}"


def read_saved(folder: Path) -> SavedRole:
    """What is saved in a role's folder. ConfigError, a line for each problem, unless all of it is there."""
    names = sorted(path.name for path in folder.glob("rank_*_of_*.json"))
    if not names:
        raise ConfigError(f"{folder}: not a saved role; no rank_*_of_*.json is in it")
    first = _read_index(folder / names[0])
    expected = [f"{rank_name(rank, first.num_ranks)}.json" for rank in range(first.num_ranks)]
    if names != expected:
        missing, others = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
        problems = [*(f"{folder / name}: missing" for name in missing)]
        problems += [f"{folder / name}: does not belong to a save by {first.num_ranks} ranks" for name in others]
        raise ConfigError(problems)
    ranks = [_read_index(folder / name) for name in names]
    if [index.rank for index in ranks] != list(range(first.num_ranks)):
        raise ConfigError(f"{folder}: indices are not those of ranks 0 to {first.num_ranks - 1}")
    if len({(index.num_ranks, index.num_updates) for index in ranks}) > 1:
        raise ConfigError(f"{folder}: indices are of different saves")
    saved = SavedRole(folder, tuple(ranks))
    if problems := [problem for kind in _KINDS for problem in _sizes(saved, kind)]:
        raise ConfigError(problems)
    return saved


_KINDS: tuple[Kind, ...] = ("model", "optimizer")


def _read_index(path: Path) -> RankIndex:
    try:
        return RankIndex.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{path}: not an index of a save ({place + ': ' if place else ''}{first['msg']})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _sizes(saved: SavedRole, kind: Kind) -> Iterator[str]:
    for path, file in saved.files(kind):
        if path.parent != saved.folder:
            yield f"{path}: not a file of {saved.folder}"
        elif not path.is_file():
            yield f"{path}: missing"
        elif (size := path.stat().st_size) != file.num_bytes:
            yield f"{path}: {size} bytes, and {file.num_bytes} were saved; it is cut off or was changed"
