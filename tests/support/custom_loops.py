"""Hand-written loops that tests train: the example's, made small, and an awkward one; struck at an exact place."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torchvision import datasets

from examples import custom_loop
from laststep import Run
from tests.support.tasks import await_agreement, in_any_order


class Struck:
    """Sends its rank a signal in the middle of a unit of work, and, if it asks for a stop, holds that until the ranks
    have agreed on one.

    LASTSTEP_TEST_SIGNAL is "SIGTERM step 5 rank 1,2" or "SIGKILL validation 2 rank 0": in that step, or in that batch
    of a validation, both counted from 1 in this attempt.
    """

    def __init__(self, run: Run) -> None:
        name, self.unit, place, _, ranks = (os.environ.get("LASTSTEP_TEST_SIGNAL") or "SIGTERM never 0 rank 0").split()
        self.number = signal.Signals[name]
        self.left = int(place) if str(run.rank) in ranks.split(",") else 0

    def strike(self, unit: str) -> None:
        """Count one more of these units, which is half done."""
        self.left -= unit == self.unit
        if unit == self.unit and self.left == 0:
            print(f"{self.number.name} in the middle of a {unit}", flush=True)
            os.kill(os.getpid(), self.number)
            if self.number != signal.SIGKILL:
                await_agreement()


def example(run: Run) -> Any:
    """examples/custom_loop.py, on 104 samples in batches of 16: 7 steps an epoch, the last of them short."""
    struck, loss = Struck(run), nn.functional.cross_entropy

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        struck.strike("step")  # batch norm has already counted this step's samples
        return loss(logits, labels)

    def validation(batches: Any) -> Iterator[Any]:
        for batch in Run.validation(run, batches):
            struck.strike("validation")
            yield batch

    class Few:
        @staticmethod
        def MNIST(*words: Any, train: bool, **more: Any) -> Dataset[Any]:
            return Subset(datasets.MNIST(*words, train=train, **more), range(104 if train else 96))

    nn.functional.cross_entropy = cross_entropy  # type: ignore[assignment]
    run.validation = validation  # type: ignore[method-assign,assignment]
    vars(custom_loop).update(datasets=Few, EPOCHS=2, BATCH_SIZE=16)
    return custom_loop.main(run)


def awaits_stop(run: Run) -> Any:
    """`example`, but each rank waits in its eighth step of an attempt until the ranks have agreed to stop."""
    steps = Run.steps

    def counted(batches: Any) -> Iterator[Any]:
        for batch in steps(run, batches):
            counted.done += 1  # type: ignore[attr-defined]
            if counted.done == 8:  # type: ignore[attr-defined]
                print("holds in its step 8", flush=True)
                await_agreement()
            yield batch

    counted.done = 0  # type: ignore[attr-defined]
    run.steps = counted  # type: ignore[method-assign,assignment]
    return example(run)


class Meter:
    """The user's own meter, which counts at the start of each step, before its update."""

    def __init__(self) -> None:
        self.seen = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.seen = state["seen"]


def awkward(run: Run) -> dict[str, float]:
    """Everything that a hand-written loop may do besides its steps: a schedule and a dictionary that change at the end
    of an epoch and at its head, an averaged model whose weights take the place of the others' in the validation, past
    torch's counting, two optimisers, accumulation, a break, and a meter that counts before the update."""
    struck = Struck(run)
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    loader = run.loader(data, 8)
    tests = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
    # Wide enough for more than one of DDP's buckets, of which the first holds 1 MiB.
    body = DistributedDataParallel(nn.Sequential(nn.Linear(12, 600), nn.BatchNorm1d(600), nn.Dropout(), nn.Tanh()))
    head = DistributedDataParallel(nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 1)))
    average = AveragedModel(body.module, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    first, second = torch.optim.AdamW(body.parameters(), lr=0.001), torch.optim.SGD(head.parameters(), lr=0.01)
    schedule, meter, best = StepLR(first, 1, gamma=0.7), Meter(), {"loss": 9.0, "epochs": 0}
    run.restore(
        body=body, head=head, average=average, first=first, second=second, schedule=schedule, meter=meter, best=best
    )
    for _ in run.epochs(3):
        body.train()
        best["epochs"] += 1
        for images, labels in run.steps(loader):
            meter.seen += 0.5 * run.step
            with body.no_sync(), head.no_sync():
                nn.functional.mse_loss(head(body(images)), labels).backward()
            loss = nn.functional.mse_loss(head(body(images + 0.1 * torch.randn_like(images))), labels)
            struck.strike("step")
            loss.backward()
            first.step()
            average.update_parameters(body.module)
            second.step()
            first.zero_grad()
            second.zero_grad()
            run.log(loss=loss.item(), seen=meter.seen)
            if run.step % 6 == 5:
                break
        schedule.step()

        body.eval()
        mine = [p.data.clone() for p in body.parameters()]
        for p, averaged in zip(body.parameters(), average.module.parameters()):
            p.data.copy_(averaged.data)
        sums = torch.zeros(())
        with torch.no_grad():
            for images, labels in run.validation(tests):
                struck.strike("validation")
                sums += nn.functional.mse_loss(head(body(images)), labels)
        for p, kept in zip(body.parameters(), mine):
            p.data.copy_(kept)
        dist.all_reduce(sums)
        best["loss"] = min(best["loss"], float(sums))
        run.log(val_loss=sums, noise=torch.randn(()), epochs=best["epochs"])
    return {"best": best["loss"], "epochs": best["epochs"], "rate": first.param_groups[0]["lr"]}


def accumulating(run: Run) -> None:
    """A step of up to four micro-batches, three in the last of an epoch, with batch norm, dropout, a second loader, a
    meter that counts before the update, and a schedule that steps once per step."""
    struck = Struck(run)
    x = torch.randn(44, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    loader, more = run.loader(data, 4), run.batches(run.loader(data, 2))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule, meter = StepLR(optimizer, 2, gamma=0.7), Meter()
    run.restore(model=model, optimizer=optimizer, schedule=schedule, meter=meter)
    for _ in run.epochs(2):
        for inputs, labels in run.steps(loader, accumulate=4):
            meter.seen += 1
            (extra, _labels) = next(more)
            model.require_backward_grad_sync = run.sync_gradients
            loss = nn.functional.mse_loss(model(inputs + 0.1 * extra.mean(0)), labels) / 4
            struck.strike("step")
            loss.backward()
            run.log(loss=4 * loss)
            if run.sync_gradients:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                run.log(seen=meter.seen)
        run.log(drawn=torch.rand(()))


def logging_late(run: Run) -> None:
    """As most people write it: the loss, which differs between ranks, is logged after the update."""
    struck = Struck(run)
    loader = run.loader(TensorDataset(torch.randn(56, 4, generator=torch.Generator().manual_seed(1))), 8)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for (inputs,) in run.steps(loader):
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            struck.strike("step")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def adversarial(run: Run) -> None:
    """Two models, each with an optimiser. In each step one is updated eight times, then the other, after a strike."""
    struck, loss_of = Struck(run), nn.functional.binary_cross_entropy_with_logits
    loader = run.loader(TensorDataset(torch.randn(56, 4, generator=torch.Generator().manual_seed(1)) + 2), 8)
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)))
    of_critic, of_maker = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (critic, maker))
    run.restore(critic=critic, maker=maker, of_critic=of_critic, of_maker=of_maker)
    for _ in run.epochs(2):
        for (real,) in run.steps(loader):
            made = maker(torch.randn(len(real), 2))
            for _ in range(8):
                said = critic(torch.cat([real, made.detach()]))
                loss = loss_of(said, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]))
                of_critic.zero_grad()
                loss.backward()
                of_critic.step()
            struck.strike("step")
            of_maker.zero_grad()
            fooled = loss_of(critic(made), torch.ones(len(real), 1))
            fooled.backward()
            of_maker.step()
            run.log(loss=loss, fooled=fooled)


def mixed(run: Run) -> None:
    """Batches that the loop draws itself, others from a second loader with a sampler, and validations within epochs."""
    struck = Struck(run)
    x = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    tests = DataLoader(data, 16, sampler=DistributedSampler(data, shuffle=False))
    sampler = WeightedRandomSampler(torch.arange(64.0).tolist(), 25)
    more = run.batches(run.loader(data, 4, sampler=sampler, drop_last=True), per_step=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(12, 8), nn.Dropout(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.restore(model=model, optimizer=optimizer)
    for _ in run.epochs(2):
        for step in run.steps(count=5):
            rows = torch.randint(64, (4,))
            inputs, labels = (torch.cat(parts) for parts in zip(data[rows], next(more), next(more)))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), labels)
            struck.strike("step")
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
            if step % 2:
                sums = torch.zeros(())
                with torch.no_grad():
                    for inputs, labels in run.validation(tests):
                        struck.strike("validation")
                        sums += nn.functional.mse_loss(model.module(inputs), labels)
                dist.all_reduce(sums)
                run.log(val_loss=sums, noise=torch.randn(()))
        run.log(drawn=torch.rand(()))


def fit(run: Run, loader: Any, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor], Tensor]) -> None:
    """Two epochs, struck in the middle of a step."""
    struck = Struck(run)
    for _ in run.epochs(2):
        for (inputs,) in run.steps(loader):
            loss = loss_of(inputs)
            struck.strike("step")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def unordered(run: Run) -> None:
    """An optimiser whose parameters come from a set. All have the same shape."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    loader, parallel = run.loader(TensorDataset(x), 4), DistributedDataParallel(model) if run.size > 1 else model
    optimizer = torch.optim.Adam(in_any_order(model.parameters()), lr=0.01)
    run.restore(model=parallel, optimizer=optimizer)
    fit(run, loader, optimizer, lambda inputs: (parallel(inputs) - inputs).square().mean())


def compiling(run: Run) -> None:
    """Compiles its loss by itself. The last of an epoch's three batches is short."""
    x = torch.randn(21, 33, generator=torch.Generator().manual_seed(1))
    loader, model = run.loader(TensorDataset(x), 8), nn.Linear(33, 33)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = torch.compile(lambda out: nn.functional.batch_norm(out, None, None, training=True).sin().sum())
    run.restore(model=model, optimizer=optimizer)
    fit(run, loader, optimizer, lambda inputs: loss_of(model(inputs)))


def careless(run: Run) -> Any:
    """A loop over 4 steps that does one thing wrong: what LASTSTEP_TEST_WRONG says."""
    wrong = os.environ.get("LASTSTEP_TEST_WRONG")
    loader = run.loader(TensorDataset(torch.ones(8, 2)), 3 if wrong == "batch size" else 4)
    model = DistributedDataParallel(nn.Linear(2, 3 if wrong == "shapes" else 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    things = {"model": model, "optimizer": optimizer}
    more: dict[str, Any] = {"names": {"teacher": model}}
    more |= {"no state": {"best": 0.5}, "strange state": {"best": {"of": [threading.Lock()]}}}
    best: dict[str, Any] = {"loss": 0.5, "hits": torch.ones(3)}
    more["differs"] = {"best": best}
    if wrong == "no optimizer":
        del things["optimizer"]
    if wrong != "no restore":
        run.restore(**things, **more.get(wrong or "", {}))
    for _ in run.epochs(2):
        if wrong == "differs":
            best["loss"] += run.rank
        for (x,) in run.steps(DataLoader([]) if wrong == "loader" else loader):  # type: ignore[arg-type]
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=model(x) if wrong == "log" else loss * float("nan") if wrong == "nan" else loss)
        if wrong == "twice":
            next(run.steps(loader))
        if wrong == "crash":
            raise ValueError("a bug of the user's")
        for _batch in run.validation(DataLoader([0] * (3 + (run.rank if wrong == "uneven" else 0)))):  # type: ignore
            pass
    return 3 if wrong == "result" else {"loss": loss}


def as_long_as_configured(run: Run) -> None:
    """Epochs of 3 steps, as many as the configuration says."""
    loader = run.loader(TensorDataset(torch.arange(24.0).view(12, 2) / 24), 4)
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.restore(model=model, optimizer=optimizer)
    for epoch in run.epochs(run.config.train.epochs):
        for (x,) in run.steps(loader):
            loss = (model(x) - x.sum(1, keepdim=True) + 0.1 * torch.randn(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        run.log(drawn=torch.rand(()), number=epoch)


class Rebinds(nn.Module):
    """Keeps two running means in buffers, and replaces them in each forward pass."""

    mean: Tensor
    data_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("data_mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.detach().mean(0)
            self.mean = 0.9 * self.mean + 0.1 * now
            self.data_mean.data = 0.9 * self.data_mean + 0.1 * now
        return self.linear(x - self.mean + self.data_mean)


class Curriculum(Dataset[Tensor]):
    """Its samples depend on what the loop sets in each epoch."""

    difficulty = 1.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), self.difficulty * index)


def careful(run: Run) -> None:
    """Loader workers, a data set that the loop changes in each epoch, and autocast around the whole loop."""
    struck, data, model = Struck(run), Curriculum(), nn.Linear(8, 8)
    loader, optimizer = run.loader(data, 4, num_workers=1), torch.optim.SGD(model.parameters(), lr=1e-3)
    run.restore(model=model, optimizer=optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        for epoch in run.epochs(2):
            data.difficulty = 1.0 + epoch
            for inputs in run.steps(loader):
                loss = (model(inputs) - inputs).square().mean()
                struck.strike("step")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)


def rebinding(run: Run) -> None:
    """A model with such buffers."""
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    model = Rebinds()
    loader, parallel = run.loader(TensorDataset(x), 4), DistributedDataParallel(model) if run.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.restore(model=parallel, optimizer=optimizer)
    fit(run, loader, optimizer, lambda inputs: (parallel(inputs) - inputs.square()).square().mean())
