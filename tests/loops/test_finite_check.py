"""A loss or gradient that is not finite is found, wherever it is, by the cheapest check that the gradients allow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laststep import compat
from laststep.loops.gradients import FiniteCheck, buckets_of

POISONS = (math.nan, math.inf, -math.inf)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of one rank, so that DDP lays gradients in buckets."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    """A loss tap and two parameters of each type, with their gradients."""
    made = [nn.Parameter(torch.zeros(())), *(nn.Parameter(torch.ones(n, dtype=d)) for d in dtypes for n in (3, 5))]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def found(check: FiniteCheck, norm: Tensor | None = None, loss_alone: bool = False) -> bool:
    return bool(check.nonfinite(norm, loss_alone))


@pytest.mark.parametrize("poison", POISONS)
def test_each_gradient_counts(poison: float) -> None:
    """One NaN anywhere is in all weights a few steps later."""
    tap, *rest = parameters(torch.float32, torch.float64, torch.bfloat16)
    check = FiniteCheck(tap, rest, in_buckets=False)
    assert not found(check)
    for parameter in (tap, *rest):
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = poison
        assert found(check)
        parameter.grad.fill_(1)


@pytest.mark.parametrize("poison", POISONS)
def test_the_norm_says_it_already(poison: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that has been computed is not finite if any gradient is not: reading all of them again, which takes
    milliseconds for a large model, would find nothing new."""
    read: list[int] = []
    real = compat.note_nonfinite

    def note(gradients: list[Tensor], at: Tensor, scale: Tensor) -> None:
        read.append(sum(gradient.numel() for gradient in gradients))
        real(gradients, at, scale)

    monkeypatch.setattr(compat, "note_nonfinite", note)
    tap, *rest = parameters(torch.float32)
    check = FiniteCheck(tap, rest, in_buckets=False)
    assert not found(check, torch.tensor(3.0))
    assert found(check, torch.tensor(poison))
    assert tap.grad is not None
    tap.grad.fill_(poison)
    assert found(check, torch.tensor(3.0)), "the loss is in no norm"
    assert read == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_norm_may_be_infinite_although_no_gradient_is(dtype: torch.dtype) -> None:
    """Large finite gradients have a norm that fp16, or the fp32 of the log, cannot hold. Their step is no fault."""
    tap, *rest = parameters(dtype)
    assert not found(FiniteCheck(tap, rest, in_buckets=False), torch.tensor(math.inf))


def test_infinite_gradients_are_part_of_fp16() -> None:
    """The gradient scaler finds them and lowers its scale."""
    tap, *rest = parameters(torch.float32)
    assert rest[0].grad is not None
    rest[0].grad.fill_(math.inf)
    assert not found(FiniteCheck(tap, rest, in_buckets=False), loss_alone=True)


def test_ddps_buckets(one_rank: None) -> None:
    """They hold each gradient, and nothing else that could be mistaken for one; the check changes no bit of them."""
    layers = nn.Sequential(nn.Linear(50, 600), nn.Linear(600, 600), nn.Linear(600, 3))  # the first bucket holds 1 MiB
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True, bucket_cap_mb=0.1)
    tap, *rest = model.parameters()
    check = FiniteCheck(tap, rest, in_buckets=True)
    for buckets in (1, 2, 2):  # DDP makes its final ones after the first backward pass
        model.zero_grad()
        model(torch.randn(4, 50)).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert len(buckets_of(gradients)) == buckets
        before = [gradient.clone() for gradient in gradients]
        assert not found(check)
        assert all(map(torch.equal, gradients, before))
        for gradient in gradients:
            kept = gradient.clone()
            gradient.view(-1)[-1] = math.nan
            assert found(check)
            gradient.copy_(kept)


def test_a_gradient_outside_of_the_buckets(one_rank: None) -> None:
    """A hook of the user's may have replaced a gradient. Then it is this one that counts, not the one in the bucket."""
    model = DistributedDataParallel(nn.Linear(10, 3), gradient_as_bucket_view=True)
    tap, weight = model.parameters()
    check = FiniteCheck(tap, [weight], in_buckets=True)
    model(torch.randn(4, 10)).sum().backward()
    assert not found(check)
    weight.grad = torch.full_like(weight, math.nan)
    assert found(check)
    weight.grad = torch.ones_like(weight)
    assert not found(check)
