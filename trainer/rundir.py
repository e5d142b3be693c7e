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
    def code(self) -> Path:
        """The code as it was at submission; every attempt in a job runs this copy."""
        return self.path / "code"

    @property
    def diff(self) -> Path:
        """What that code had beyond its commit, where git knows of one."""
        return self.path / "code.diff"

    @property
    def packages(self) -> Path:
        """The Python packages installed then, as `pip freeze` lists them."""
        return self.path / "packages.txt"

    @property
    def submissions(self) -> Path:
        """Each time it was submitted or started, a JSON object a line: job_id, time, host, command,
        commit."""
        return self.path / "submissions.jsonl"

    @property
    def plan(self) -> Path:
        """How long the run is, as JSON: total_steps, batch_size. Known once the data have been looked at."""
        return self.path / "plan.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, one `step_000001234/` each."""
        return self.path / "checkpoints"

    @property
    def compiled(self) -> Path:
        """What torch.compile has made, for the attempts that come after."""
        return self.path / "compiled"

    @property
    def metrics(self) -> Path:
        """Each step and each epoch once, a JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of the event files: the same curves, for TensorBoard."""
        return self.path / "tensorboard"

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

    def collectives(self, attempt: str) -> Path:
        """What the ranks of an attempt did last over NCCL, where that failed; the rank's number comes behind it."""
        return self.logs / f"{attempt}_collectives_"

    @property
    def report(self) -> Path:
        """The page that shows how the run went."""
        return self.path / "report.html"

    @property
    def rescues(self) -> Path:
        """Where the ranks that are left after a fault agree on who saves, a folder for each attempt."""
        return self.path / "rescue"

    def meeting(self, attempt: str) -> Path:
        """Where rank 0 publishes its address to the other ranks of one attempt."""
        return self.path / "meeting" / f"{attempt}.json"

    @property
    def sweep(self) -> Path:
        """Of a sweep's own folder, which has its logs and its code: each of its runs, a JSON object a line."""
        return self.path / "sweep.jsonl"
