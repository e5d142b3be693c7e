"""RunDir: the path of every file and folder of a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def aside(path: Path) -> Path:
    """A new name next to `path`, for a file or folder that replaces it once it is complete.

    It is random: processes of two hosts, or of two containers on one host, may have the same host name and process id.
    """
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}.tmp")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a small file, or replace it, at once for any reader. Raises OSError."""
    temporary = aside(path)
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    temporary.replace(path)


def fsync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RunDir:
    """The folder of one run. No other code builds a path inside a run folder by hand."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def typed(self) -> str:
        """The run as a command names it from any folder: for what a job or an alert says."""
        return shlex.quote(str(self.path))

    def is_gone(self) -> bool:
        """Whether the run was deleted or moved away: no folder, or one without a configuration. False in doubt."""
        try:
            self.config.stat()
        except FileNotFoundError:
            return True
        except OSError:  # a file system that does not answer right now
            return False
        return False

    # Written at submission.

    @property
    def config(self) -> Path:
        """The resolved configuration. Every attempt, and `resume`, reads this file."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """A copy of the code at submission. Every attempt in a job runs this copy."""
        return self.path / "code"

    @property
    def diff(self) -> Path:
        """The uncommitted changes in the user's repository, or in Laststep's clone, where that is in git."""
        return self.path / "code.diff"

    @property
    def packages(self) -> Path:
        """The Python packages installed at submission, in the format of `pip freeze`."""
        return self.path / "packages.txt"

    @property
    def environment(self) -> Path:
        """A link to the Python environment of the run's lock file, beside all runs; only with launch.uv."""
        return self.path / "environment"

    @property
    def secrets(self) -> Path:
        """The values of secret keys, as JSON, readable by the owner alone: config.yaml has masks for them."""
        return self.path / "secrets.json"

    @property
    def submissions(self) -> Path:
        """One JSON object per line for each submission or start: job_id, time, host, command, folder, commit,
        version."""
        return self.path / "submissions.jsonl"

    # The training: its length, its state, its results.

    @property
    def plan(self) -> Path:
        """The length of the run, as JSON: total_steps, batch_size. Written once the size of the data set is known."""
        return self.path / "plan.json"

    @property
    def given(self) -> Path:
        """The keys that the user has set for the run, as a JSON list: the other values are defaults."""
        return self.path / "given.json"

    @property
    def initial_weights(self) -> Path:
        """The weights that the run started from, as JSON: source, weights_sha256. Only where model.weights is set."""
        return self.path / "initial_weights.json"

    @property
    def data(self) -> Path:
        """The fingerprint of the data that the run trains on, as JSON. Only where the task gives one."""
        return self.path / "data.json"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, each a folder such as `step_000001234/`."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object per line for each step and each epoch; each appears exactly once."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files: the same curves as metrics.jsonl."""
        return self.path / "tensorboard"

    @property
    def telemetry(self) -> Path:
        """Folder of what the machines did: a file of JSON lines per node, see laststep.telemetry."""
        return self.path / "telemetry"

    @property
    def alerts(self) -> Path:
        """Folder of the alerts: a file for each that is due, see laststep.alert."""
        return self.path / "alerts"

    @property
    def report(self) -> Path:
        """The HTML page that `launch.py report` writes."""
        return self.path / "report.html"

    @property
    def compiled(self) -> Path:
        """Cache of torch.compile, shared by all attempts."""
        return self.path / "compiled"

    @property
    def files(self) -> Path:
        """What a command that does not know Laststep keeps for itself: its LASTSTEP_FOLDER."""
        return self.path / "files"

    @property
    def progress(self) -> Path:
        """Of such a command alone, as JSON: its words, and what was in `files`, as its newest attempt began."""
        return self.path / "progress.json"

    # The attempts: how each one ended, and what its ranks use to coordinate.

    @property
    def attempts(self) -> Path:
        """One JSON object per line for each attempt that has ended."""
        return self.path / "attempts.jsonl"

    @property
    def attempt_now(self) -> Path:
        """The attempt that is running. It stays behind only when an attempt dies without recording how it ended."""
        return self.path / "attempt.json"

    @property
    def attempt_ended(self) -> Path:
        """attempt.json, renamed while the end of that attempt is being added to attempts.jsonl."""
        return self.path / "attempt.ended.json"

    @property
    def reserve(self) -> Path:
        """Room for the record of an attempt's end, should the disk be full by then: a file without meaning."""
        return self.path / "reserve"

    @property
    def logs(self) -> Path:
        """Folder of each rank's output and of submitit's own files."""
        return self.path / "logs"

    def beside_log(self, name: str) -> Path:
        """The output of a program that runs beside the training. The runs of a sweep share the folder of logs."""
        return self.logs / f"{self.name}.{name}.log"

    def next_nodes(self, job_id: str) -> Path:
        """srun's options for the next start of the ranks in a job, which say on which of its nodes they start."""
        return self.logs / f"{job_id}.next_nodes"

    def step_over(self, job_id: str) -> Path:
        """A file that appears when the ranks of a job have ended by a fault of a node: its srun may never end."""
        return self.logs / f"{job_id}.step_over"

    def collectives(self, attempt: str) -> Path:
        """The last NCCL collectives of an attempt in which one failed; append a rank's number to get its file."""
        return self.logs / f"{attempt}_collectives_"

    @property
    def lock(self) -> Path:
        """Locked by rank 0 of the attempt that is running; see laststep.ranks.disk."""
        return self.path / "lock"

    def meeting(self, attempt: str) -> Path:
        """The file in which rank 0 publishes its address to the other ranks of an attempt."""
        return self.path / "meeting" / f"{attempt}.json"

    @property
    def rescues(self) -> Path:
        """Folder in which the surviving ranks agree, after a fault, on which of them saves; a subfolder per attempt."""
        return self.path / "rescue"

    @property
    def step_restart(self) -> Path:
        """The answer to the ranks' supervisors whether their ranks start again, see laststep.records.attempts."""
        return self.path / "restart.json"

    def track(self, tracker: str) -> Path:
        """Folder of what the sender of a tracker keeps: the id of its run, how far it has sent, its lock."""
        return self.path / "track" / tracker

    @property
    def media(self) -> Path:
        """Folder of the images, tables and texts that the run has logged, in a subfolder for each step."""
        return self.path / "media"

    @property
    def probes(self) -> Path:
        """Folder of what the ranks note for `prove`: one file per rank, see laststep.records.probes."""
        return self.path / "probes"

    @property
    def sweep_folder(self) -> RunDir | None:
        """The folder of the sweep that this run is part of, which has the logs of all its runs; None without one."""
        return RunDir(self.logs.resolve().parent) if self.logs.is_symlink() else None

    @property
    def sweep(self) -> Path:
        """In the folder of a sweep, which also has its code and logs: one JSON object per line for each of its runs."""
        return self.path / "sweep.jsonl"
