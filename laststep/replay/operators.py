"""What each operator of torch returned in a step: noted by the ranks of a replay, to name the first that differs.

In the steps that are watched, all that torch computes passes through `Recorder`, forward and backward passes and the
update alike. It notes a hash of the bits of each result, the operator's name, and in which module it ran. Left out are
operators that return a view, or memory without content, and those that communicate: a result may still be on its way,
and is seen where it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from laststep import compat
from laststep.checkpoint.shards import is_distributed, local_of
from laststep.loops.digest import StateDigest
from laststep.ranks.world import ShardPlace
from laststep.rundir import RunDir

WHOLE = ShardPlace(0, 1, 0, 1)
LEFT_OUT = ("c10d", "_c10d_functional", "c10d_functional", "fsdp", "profiler", "prim")
WITHOUT_CONTENT = ("empty", "new_empty", "resize", "set_")
MOST_SAVED = 256 << 20  # bytes of results that a rank keeps, so that differing bits can be counted


class Observer:
    """Watches the steps of one rank, see `laststep.loops.probe`."""

    def __init__(self, run: RunDir, rank: int, asked: Mapping[str, Any]) -> None:
        self._names: dict[int, str] = {}
        self._file = notes_of(run, rank)
        self._saved = 0
        self._folder = self._file.with_suffix("")
        self._recorder: Recorder | None = None

    def watch(self, registered: Any) -> None:
        """Name what a model computes."""
        for name, module in registered.named_modules() if isinstance(registered, nn.Module) else ():
            self._names.setdefault(id(module), ".".join(part for part in name.split(".") if part != "module"))

    def begin_step(self, step: int, batch: Any) -> None:
        """A step begins, with this batch."""
        self._recorder = Recorder(step, self._names, MOST_SAVED - self._saved)
        self._recorder.__enter__()

    def end_step(self) -> None:
        """It is done: write what it did."""
        if self._recorder is None:
            return
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)
        with self._file.open("a") as file:
            for line in recorder.lines():
                file.write(json.dumps(line) + "\n")
        self._folder.mkdir(exist_ok=True)
        torch.save(recorder.kept, self._folder / f"{recorder.step}.pt")
        self._saved += recorder.bytes


class Recorder(compat.dispatch_mode()):  # type: ignore[misc]
    """Notes what each operator returns, from __enter__ to __exit__."""

    def __init__(self, step: int, names: dict[int, str], most_bytes: int) -> None:
        super().__init__()
        self.step, self.kept, self.bytes = step, dict[int, list[Tensor]](), 0
        self._names, self._most = names, most_bytes
        self._stack: list[tuple[str, int]] = []  # of the modules under way: the name, and where autograd was
        self._spans: list[tuple[int, int, str]] = []  # what autograd numbered within a module
        self._found: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._digest: dict[torch.device, StateDigest] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Any:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        above = self._stack[-1][0] if self._stack else ""
        self._stack.append((above if name is None else name, compat.autograd_number()))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            name, began = self._stack.pop()
            self._spans.append((began, compat.autograd_number(), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See compat.dispatch_mode: called in place of each operator."""
        result = func(*args, **(kwargs or {}))
        if tensors := computed(func, args, kwargs or {}, result):
            self._note(str(func), tensors)
        return result

    def _note(self, name: str, tensors: list[Tensor]) -> None:
        line = {
            "step": self.step,
            "operator": name,
            "where": self._where(),
            "shapes": [[*tensor.shape] for tensor in tensors],
            "types": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        }
        hashes = [self._hash(tensor) for tensor in tensors]
        size = sum(tensor.nbytes for tensor in tensors)
        if self.bytes + size <= self._most:
            self.kept[len(self._found)] = [tensor.detach().clone() for tensor in tensors]
            self.bytes += size
        self._found.append((line, hashes))

    def _hash(self, tensor: Tensor) -> Tensor:
        digest = self._digest.setdefault(tensor.device, StateDigest(tensor.device))
        found = digest.of({"": tensor}, WHOLE)
        return torch.zeros((), dtype=torch.int64) if found is None else found

    def _where(self) -> str:
        if (number := compat.autograd_node_number()) is not None:
            # The innermost module has ended first.
            inside = next((name for began, ended, name in self._spans if began <= number < ended), "")
            return f"backward of {inside}" if inside else "backward"
        return self._stack[-1][0] if self._stack else ""

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was noted, in order."""
        for line, hashes in self._found:
            yield {**line, "hash": " ".join(f"{int(each) & (1 << 64) - 1:016x}" for each in hashes)}


def computed(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The tensors that an operator has computed; none for one that is left out."""
    namespace, _, rest = str(func).partition(".")
    if namespace in LEFT_OUT or rest.startswith(WITHOUT_CONTENT) or getattr(func, "is_view", False):
        return []
    return list(_tensors(_written(func, args, kwargs, result)))


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """What an operator has computed: what it returns, and what it has written into."""
    schema = compat.schema_of(func)
    if not schema.is_mutable:
        return result
    found = [result]
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    seen: set[int] = set()
    stack = [value]
    while stack:
        one = stack.pop(0)
        if isinstance(one, (list, tuple)):
            stack[:0] = one
        elif isinstance(one, Tensor) and id(one) not in seen:
            seen.add(id(one))
            if is_distributed(one):
                one = local_of(one)
            if type(one) in (Tensor, nn.Parameter, nn.Buffer) and one.layout is torch.strided and one.numel():
                yield one


def notes_of(run: RunDir, rank: int) -> Path:
    """The file of what a rank has noted of operators."""
    return run.probes / f"operators_{rank}.jsonl"


def differing_bits(first: RunDir, second: RunDir, rank: int, step: int, number: int) -> int | None:
    """How many bits differ in what an operator returned, counted in its step; None where that was not kept."""
    found = []
    for run in (first, second):
        kept = torch.load(notes_of(run, rank).with_suffix("") / f"{step}.pt", map_location="cpu")
        if number not in kept:
            return None
        found.append(kept[number])
    total = 0
    for one, other in zip(*found):
        if one.shape != other.shape or one.dtype != other.dtype:
            return None
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
        changed = bits[0] ^ bits[1]
        total += sum(int((changed >> place & 1).sum()) for place in range(8))
    return total
