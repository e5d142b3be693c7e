"""The table of verbs: the dispatch, the parsers, the help's list of verbs and the completion all follow from it.

The verb NAME is laststep/cli/NAME.py, which is imported only when that verb is used. It defines DESCRIPTION,
`add_arguments(parser)`, `run(args)`, which returns the exit status or raises ConfigError, and, where its help needs
one, EPILOG, in which {program} stands for the command's name and {path} for the command with its path. Importing it
must be cheap, since --help and the Tab key wait for it: anything that needs torch, submitit or rich is imported inside
`run`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from laststep import rooms, script
from laststep.cli.parsers import Parser
from laststep.config.errors import ConfigError
from laststep.say import program

DEFAULT = "submit"  # when no verb is given


@dataclass(frozen=True)
class Verb:
    """One verb: its name, and the two columns of the line that lists it."""

    name: str
    usage: str
    help: str

    def module(self) -> Any:
        """Import the verb's module."""
        return importlib.import_module(f"laststep.cli.{self.name}")

    def parser(self) -> Parser:
        """The parser of the words after the verb."""
        module = self.module()
        name = f"[{self.name}]" if self.name == DEFAULT else self.name
        path = "laststep" if program() == "laststep" else "python /path/to/launch.py"
        epilog = getattr(module, "EPILOG", "").replace("{program}", program()).replace("{path}", path)
        parser = Parser(f"{program()} {name}", module.DESCRIPTION, epilog)
        module.add_arguments(parser)
        return parser

    def run(self, words: Sequence[str]) -> int:
        """Parse the words after the verb and run it; returns the exit status. Raises ConfigError."""
        parser = self.parser()
        own, passed_on = _at_separator(words) if parser.passes_on else (words, [])
        if parser.takes_script:
            own, passed_on = script.split(words)
        args = parser.parse_intermixed_args(own)
        args.passed_on = passed_on
        if parser.takes_script and passed_on:
            args.overrides.append(script.as_override(passed_on))
        for word in getattr(args, "overrides", ()):
            if "=" not in word:
                self._refuse(word, takes_run=hasattr(args, "run"))
        status: int = self.module().run(args)
        return status

    def _refuse(self, word: str, takes_run: bool) -> NoReturn:
        """Raise ConfigError for a word where only key=value may stand."""
        if word in VERBS:
            raise ConfigError(f"{self.name} {word}: two verbs; type one of them")
        if takes_run:
            raise ConfigError(f"{word}: {self.name} takes one run; for another one, type the command again")
        raise ConfigError(f"{word}: not a verb, an option or key=value; see --help")


VERBS = {
    verb.name: verb
    for verb in (
        Verb("init", "init [DIR]", "write a small project to start from"),
        Verb("submit", "submit", "start a new run"),
        Verb("sweep", "sweep key=v1,v2", "submit one run per combination of values"),
        Verb("resume", "resume RUN", "continue a run in a new job, on any number of ranks"),
        Verb("status", "status [RUN ...]", "show the state of all runs, or of these"),
        Verb("list", "list", "print the names of all runs, one per line"),
        Verb("logs", "logs RUN", "print the logs of all ranks, merged by time"),
        Verb("cancel", "cancel RUN", "stop a run after its current step, keeping every step"),
        Verb("delete", "delete RUN", "delete a run for good, after asking; cancels its jobs first"),
        Verb("drill", "drill RUN", "preempt a run on purpose and check that it comes back"),
        Verb("prove", "prove", "check that a script resumes exactly, by runs on this machine"),
        Verb("verify", "verify RUN", "check every checkpoint of a run for damage"),
        Verb("export", "export RUN OUT", "write a run's weights to a .safetensors or .pt file"),
        Verb("evaluate", "evaluate RUN", "validate a checkpoint again, on the same or on other data"),
        Verb("generate", "generate RUN", "print text that a language model writes"),
        Verb("prepare", "prepare TEXT OUT", "make token files for a language model from text"),
        Verb("samples", "samples RUN", "name the samples that a step used, for every rank"),
        Verb("replay", "replay RUN", "do a step again, with the same batch and the same bits"),
        Verb("diff", "diff A B", "find where two runs part: the step, the rank, the operator"),
        Verb("report", "report RUN [...]", "write the curves and attempts of runs to an HTML page"),
        Verb("tensorboard", "tensorboard", "show the curves of all runs, or of these, in TensorBoard"),
        Verb("shell", "shell", "nodes of your own, on which ranks start without a queue"),
        Verb("disk", "disk", "show what each run holds on the disk, and what may go"),
        Verb("track", "track RUN", "send to W&B, MLflow or trackio what they do not have yet"),
        Verb("doctor", "doctor", "check this cluster for anything that could break a run"),
        Verb("completion", "completion SHELL", "print a script that lets the Tab key complete all this"),
        Verb("help", "help [VERB]", "print this help, or that of a verb"),
    )
    if not rooms.lacks_verb(verb.name)
}


def _at_separator(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before `--`, and those after it."""
    at = [*words, "--"].index("--")
    return words[:at], words[at + 1 :]


def verb_list() -> str:
    """One line per verb, as the command's help shows them."""
    return "\n".join(f"  {verb.usage:<18}{verb.help}" for verb in VERBS.values())
