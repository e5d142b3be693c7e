"""An exception in the log: once, and only the lines of the user's own code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from types import TracebackType

from laststep.config.errors import ConfigError
from laststep.records.attempt_record import in_one_line
from laststep.say import command, counted, say

LASTSTEP = Path(__file__).resolve().parent.parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
MOST_CHARACTERS = 20_000
REFUSED = re.compile(r"([^\n:'\"(]+?) does not have a deterministic implementation, but you set")
# Whether the main function of this process is ours (`python -m laststep`, --debug). It prints a ConfigError as
# one line, which the log need not have too.
main_is_ours = False
is_debugged = False  # --debug: the command says what to type next


def describe(error: BaseException) -> str:
    """The traceback of an error, without the calls that led to the user's code. Complete where it did not get there."""
    at = error.__traceback__
    while at is not None and not _is_users(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    text = "".join(traceback.format_exception(type(error), error, at or error.__traceback__))
    if len(text) <= MOST_CHARACTERS:
        return text
    begin, _, _ = text[: MOST_CHARACTERS // 4].rpartition("\n")
    _, _, end = text[-MOST_CHARACTERS * 3 // 4 :].partition("\n")
    return f"{begin}\n  [...]\n{end}"


def say_error(text: str) -> None:
    """Print an error with its traceback, and in each traceback that comes to the user's code no other frames."""
    say(_TRACEBACK.sub(_folded, text if text.endswith("\n") else f"{text}\n"))


def _folded(traceback_: re.Match[str]) -> str:
    frames = re.split(r"^(?=  File \")", traceback_[2], flags=re.MULTILINE)[1:]
    files = [frame.split('"')[1] for frame in frames]
    users = [frame for frame, file in zip(frames, files) if _is_users(file)]
    if not users or len(users) == len(frames):
        return traceback_[0]
    others = ", ".join(dict.fromkeys(_library(file) for file in files if not _is_users(file)))
    count = counted(len(frames) - len(users), "frame")
    return f"{traceback_[1]}{''.join(users)}  ({count} of {others}: `{command('logs RUN --traceback')}`)\n"


_TRACEBACK = re.compile(r"(^.*Traceback \(most recent call last\):\n)((?: .*\n)+)", re.MULTILINE)


def _library(file: str) -> str:
    """The name of the library that a file is of."""
    installed = re.search(r"/(?:site|dist)-packages/(\w+)", file)
    return installed[1] if installed else "laststep" if Path(file).resolve().is_relative_to(LASTSTEP) else "Python"


def short(error: BaseException) -> str:
    """A library's error in one line, without the place in its source and its advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", line).partition(". This is typically")[0]


def refused_operator(error: BaseException) -> ConfigError | None:
    """The one line for an operator that torch refuses because it has no deterministic form (`train.deterministic`), in
    whatever thread or process; None for any other error."""
    each: BaseException | None = error
    while each is not None:
        if found := REFUSED.search(str(each)):
            place = _users_line(each)
            return ConfigError(
                f"train.deterministic=true: {found[1].strip()}{place and f' ({place})'} has no deterministic form in "
                "this torch; replace it, or set train.deterministic=false, with which the last bits of a resumed run "
                "may differ"
            )
        each = each.__cause__
    return None


def _users_line(error: BaseException) -> str:
    """The innermost line of the user's code that led to an error, as `model.py:12`; empty where there is none."""
    lines = traceback.walk_tb(error.__traceback__)
    users = [
        f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in lines if _is_users(frame.f_code.co_filename)
    ]
    return users[-1] if users else ""


def silence(error: BaseException) -> None:
    """Keep Python from printing the error, which is in the log already, once more as it ends the process."""
    hook = sys.excepthook

    def print_others(kind: type[BaseException], value: BaseException, at: TracebackType | None) -> None:
        if value is not error:
            hook(kind, value, at)

    sys.excepthook = print_others


def write_for_torchrun(text: str) -> None:
    """Have torchrun, which ends with the error of the first rank that failed, print this one; elsewhere do nothing."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        line = in_one_line(text)
        data = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": data}))


def _is_users(file: str) -> bool:
    path = Path(file).resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_file() and not (installed or path.is_relative_to(LASTSTEP) or path.is_relative_to(STANDARD_LIBRARY))
