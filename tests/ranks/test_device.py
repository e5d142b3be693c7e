"""Which GPU a rank has, as its card at the store says it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from laststep.ranks.device import gpu_uuid

CARD, OTHER = "0e5b1f00-1111-2222-3333-444444444444", "0e5b1f00-5555-6666-7777-888888888888"


@pytest.mark.parametrize(
    ("visible", "index", "uuid"),
    [
        (None, 0, f"GPU-{CARD}"),
        (None, 1, f"GPU-{OTHER}"),
        ("1,0", 0, f"GPU-{CARD}"),
        (f"GPU-{CARD}", 0, f"GPU-{CARD}"),
        ("MIG-a", 0, "MIG-a"),
        ("MIG-a, MIG-b", 1, "MIG-b"),
    ],
)
def test_the_uuid_of_a_gpu(visible: str | None, index: int, uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of one GPU must not look like the same device, nor two GPUs, or a right layout would be refused."""
    known = [SimpleNamespace(uuid=CARD), SimpleNamespace(uuid=OTHER)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known[device.index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_uuid(torch.device("cuda", index)) == uuid


def test_a_device_without_a_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none, and a virtual GPU may have none: neither is the same device as another one."""
    nothing = SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: nothing)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_uuid(torch.device("cpu")) == gpu_uuid(torch.device("cuda", 0)) == ""
