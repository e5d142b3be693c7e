"""An exception in the log: once, and from the first line of the user's own code on."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from laststep.config.errors import ConfigError

LASTSTEP = Path(__file__).resolve().parent.parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
MOST_CHARACTERS = 20_000
REFUSED = re.compile(r"([^\n:'\"(]+?) does not have a deterministic implementation, but you set")
# Whether the main function of this process is ours (`python -m laststep`, --debug). It prints a ConfigError as
# one line, which the log need not have too.
main_is_ours = False


def describe(error: BaseException) -> str:
    """The traceback of an error, without the calls that led to the user's code. Complete where it did not get there."""
    at = error.__traceback__
    while at is not None and not _is_users(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    return "".join(traceback.format_exception(type(error), error, at or error.__traceback__))[-MOST_CHARACTERS:]


def short(error: BaseException) -> str:
    """A library's error in one line, without the place in its source and its advice."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\] ", "", line).partition(". This is typically")[0]


def refused_operator(error: BaseException) -> ConfigError | None:
    """The one line for an operator that torch refuses because it has no deterministic form, see `train.deterministic`;
    None for any other error. The error may be that of a loader process, of the compiler or of the rehearsal."""
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


def _is_users(file: str) -> bool:
    path = Path(file).resolve()
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return path.is_file() and not (installed or path.is_relative_to(LASTSTEP) or path.is_relative_to(STANDARD_LIBRARY))
