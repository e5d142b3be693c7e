"""The manifest of a checkpoint: what it is of, and the size and SHA-256 of each of its files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import islice

from laststep.checkpoint.files import CheckpointError, FileEntry

FORMAT = 2
SHARDED_FORMAT = 3  # of a checkpoint with a `sharding`
STRUCTURE = "structure.pt"
OPAQUE = "opaque"


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json.

    `metrics` are those of the validation right before the save, empty if there was none. `numerics` is what the last
    bits of a step depend on, see `laststep.ranks.device.describe_numerics`. `config` is the resolved configuration as
    YAML, a copy of the run's config.yaml; empty in a checkpoint of an older version. `sharding` has the number of files
    of each shard of the state; it is empty when every rank held all of the state.
    """

    step: int
    epoch: int
    samples: int
    world_size: int
    metrics: dict[str, float]
    files: dict[str, FileEntry]
    numerics: dict[str, str | int] = field(default_factory=dict)
    config: str = ""
    format: int = FORMAT
    sharding: list[int] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str, step: int) -> Manifest:
        """The manifest with this text, of the checkpoint of `step`. Raises CheckpointError."""
        try:
            manifest = cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"manifest.json cannot be read: {error}") from None
        if manifest.format not in (FORMAT, SHARDED_FORMAT):
            readable = f"formats {FORMAT} and {SHARDED_FORMAT}"
            raise CheckpointError(f"its format is {manifest.format}, this version of Laststep reads {readable}")
        if manifest.step != step or not manifest._is_complete():
            raise CheckpointError(f"manifest.json does not describe step {step}")
        return manifest

    def text(self) -> str:
        """The contents of the file."""
        return json.dumps({name: value for name, value in vars(self).items() if name != "sharding" or value}, indent=1)

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())

    @property
    def shards(self) -> list[str]:
        """Names of the shard files, in the order of their bytes."""
        size = len(self.files) - len(self.opaque) - 1
        return [shard_name(rank, size) for rank in range(size)]

    @property
    def shards_of_state(self) -> list[list[str]]:
        """The names of the files of each shard of the state, in the order of their bytes."""
        names = iter(self.shards)
        return [list(islice(names, count)) for count in self.sharding or [len(self.shards)]]

    @property
    def opaque(self) -> dict[str, FileEntry]:
        """The files that a framework has written in its own format; empty in any other checkpoint."""
        return {name: entry for name, entry in self.files.items() if name.startswith(f"{OPAQUE}/")}

    def _is_complete(self) -> bool:
        """Whether it describes all files of a checkpoint."""
        described = isinstance(self.files, dict) and all(
            isinstance(entry, dict) and {"bytes", "sha256"} <= entry.keys() for entry in self.files.values()
        )
        if not described or not self.shards or self.files.keys() - self.opaque.keys() != {STRUCTURE, *self.shards}:
            return False
        if self.format == FORMAT:
            return self.sharding == []
        counts = self.sharding if isinstance(self.sharding, list) else []
        return all(type(count) is int and count > 0 for count in counts) and sum(counts) == len(self.shards)


def shard_name(number: int, of: int) -> str:
    """The name of a shard file. It says how many a complete checkpoint has."""
    return f"shard_{number:04d}-of-{of:04d}.bin"
