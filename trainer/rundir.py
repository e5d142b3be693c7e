"""RunDir: every path of a run, spelled once."""

from __future__ import annotations

from pathlib import Path


class RunDir:
    """The folder of one run. Nothing else in the code joins a path of a run by hand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved configuration; a resumed run reads this one."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, one `step_000001234/` each."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Each step and each epoch once, a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def attempts(self) -> Path:
        """Each ended attempt, a JSON object a line."""
        return self.path / "attempts.jsonl"

    @property
    def attempt_now(self) -> Path:
        """The attempt under way; left behind only by one that could not say how it ended."""
        return self.path / "attempt.json"

    @property
    def attempt_ended(self) -> Path:
        """attempt.json of an attempt whose end is being entered in attempts.jsonl."""
        return self.path / "attempt.ended.json"

    @property
    def lock(self) -> Path:
        """Locked by rank 0 of the attempt at work."""
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        """What each rank printed, and submitit's own files."""
        return self.path / "logs"

    @property
    def rescues(self) -> Path:
        """Where the ranks that are left after a fault agree on who saves, a folder for each attempt."""
        return self.path / "rescue"

    def meeting(self, attempt: str) -> Path:
        """Where rank 0 publishes its address to the other ranks of one attempt."""
        return self.path / "meeting" / f"{attempt}.json"
