"""What stands in front of Slurm's commands in tests/faults/slurm_day.py: it notes each call; one of them misbehaves.

Copies of it are called squeue, scontrol and so on. It imports little: a run calls it a hundred times.

Beside it are the folder `calls`, with an empty file for each call, and these files:
    phase     what the run is doing, as the harness sees it
    faults    which calls misbehave and how, one per line, such as `stop|ranks|scontrol requeue|0|lie`
    hits      a folder with an empty file for each of them that was made
    down      until when (Unix seconds) each call fails, as if the controller was away
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

AWAY = "Unable to contact slurm controller (connect failure)"
ERROR = {
    "squeue": f"slurm_load_jobs error: {AWAY}",
    "sbatch": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "scancel": "scancel: error: Kill job error: Socket timed out on send/recv operation",
    "srun": "srun: error: Unable to create step for job: Socket timed out on send/recv operation",
}
LATE_S = 4.0
DOWN_S = 120.0
FOREVER_S = 3600.0
VERBS = 2  # words of scontrol that name a call, such as `show job`


def kind_of(words: list[str]) -> str:
    """What a call is for, whatever it is about: `scontrol show job`, `scancel --signal`."""
    program, *rest = words
    plain = [word for word in rest if not word.startswith("-")]
    if program == "scontrol":
        return " ".join([program, *plain[: VERBS if plain[:1] == ["show"] else 1]])
    options = ("--version", "--signal", "--states", "--nodelist", "--relative")
    named = [option for option in options if any(word.startswith(option) for word in rest)]
    return " ".join([program, *named[:1]])


def role() -> str:
    """Whose call it is. Most callers take the variables of Slurm away."""
    if "LASTSTEP_STEP_RESTARTS" in os.environ:
        return "ranks"
    return "batch shell" if "SLURMD_NODENAME" in os.environ else "command"


def number(folder: str, call: str) -> int:
    """How often the call was made before, in this phase. Notes it."""
    for count in range(10_000):
        try:
            os.close(os.open(os.path.join(folder, "calls", f"{call}|{count}"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            continue
        return count
    raise RuntimeError(call)


def read(path: str) -> str:
    """A file's text; empty where there is none."""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def fail(program: str) -> None:
    """End with the error of a controller that is away."""
    sys.stderr.write(ERROR.get(program, AWAY) + "\n")
    sys.exit(1)


def main() -> None:
    folder, program = os.path.split(os.path.abspath(sys.argv[0]))
    words = [program, *sys.argv[1:]]
    real = next(
        path
        for path in (os.path.join(place, program) for place in os.environ.get("PATH", "/usr/bin").split(":"))
        if os.access(path, os.X_OK) and os.path.dirname(path) != folder
    )
    by, phase = role(), read(os.path.join(folder, "phase"))
    if by != "command" and phase == "submit":  # the job may start before the command has ended
        phase = "start"
    call = f"{phase}|{by}|{kind_of(words)}"
    made = f"{call}|{number(folder, call)}|"
    faults = [line for line in read(os.path.join(folder, "faults")).splitlines() if line.startswith(made)]
    how = faults[0].rpartition("|")[2] if faults else ""
    if how:
        open(os.path.join(folder, "hits", faults[0]), "w").close()
    if how == "down":
        with open(os.path.join(folder, "down"), "w") as file:
            file.write(str(time.time() + DOWN_S))
    if how == "down" or time.time() < float(read(os.path.join(folder, "down")) or 0):
        # sbatch and srun try for some seconds to reach the controller; neither has reached it.
        sys.stderr.write(f"{program}: error: {AWAY}\n")
        sys.exit(1)
    if how == "fail":
        fail(program)
    if how == "hang":
        time.sleep(FOREVER_S)
    if how == "late":
        time.sleep(LATE_S)
    if how in ("part", "lie", "mute"):
        done = subprocess.run([real, *words[1:]], stdout=subprocess.PIPE)
        if how == "mute":
            time.sleep(FOREVER_S)
        if how == "lie":
            fail(program)
        sys.stdout.buffer.write(done.stdout[: len(done.stdout) // 10])
        sys.stdout.flush()
        sys.exit(done.returncode)
    os.execv(real, words)


if __name__ == "__main__":
    main()
