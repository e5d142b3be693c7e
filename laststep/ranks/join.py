"""join: set up this rank's device and register it with the other ranks, as the configuration says."""

from __future__ import annotations

import json
import os
import resource
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from laststep.config.config import Config
from laststep.config.errors import ConfigError, first_line
from laststep.ranks.address import PUBLISH_S, connect_to_store
from laststep.ranks.device import choose_backend, gpu_uuid, set_up_device
from laststep.ranks.group import Group, Registration, log_if_slow, meeting_timeout, registration_key
from laststep.ranks.patience import Patience
from laststep.ranks.seal import Seal
from laststep.ranks.sealed_store import SealedStore
from laststep.ranks.world import MeetingError, World, hostname
from laststep.say import say


def join(config: Config, world: World, address_file: Path, timeout_s: float) -> Group:
    """The group that this rank now belongs to; call `Group.connect` next. Raises as `register_rank` does."""
    device = set_up_device(config, world)
    return register_rank(
        world, device, choose_backend(config, device), address_file, timeout_s, config.launch.init_method
    )


def register_rank(
    world: World,
    device: torch.device,
    backend: str,
    address_file: Path,
    timeout_s: float,
    init_method: str | None = None,
) -> Group:
    """Connect to the store at which the ranks meet, and register this rank there. Does not wait for the other ranks:
    `Group.connect` does. Collectives will run over `backend`, nccl or gloo.

    As in `torch.distributed.init_process_group`, `init_method` says where rank 0 is found: `tcp://HOST:PORT`, `env://`
    (MASTER_ADDR and MASTER_PORT), or `file://PATH`, a file in which rank 0 publishes the free port that it took and
    every address of its host. The default is env:// where both variables are set, else file:// with `address_file`,
    which belongs to this attempt alone. Beside it, and so on a disk that all ranks share, rank 0 leaves the secret of
    the attempt's seal.

    Raises MeetingError when the store cannot be reached in time, ConfigError when its address cannot be right, or when
    another job or another process with the same rank is there.
    """
    if world.size == 1:
        return Group(world, dist.HashStore(), device, backend)
    _raise_open_files_limit()
    _shorten_name_lookups()
    seal, secret = Seal(), secret_file(address_file)
    timeout = meeting_timeout(timeout_s)
    if world.rank == 0:
        Patience(PUBLISH_S, say).insist(lambda: seal.save(secret))
    purpose = f"{address_file.parent.parent.name}, attempt {address_file.stem}, {world.size} ranks"
    with log_if_slow(lambda: f"rank 0 on {world.host_of(0)}"):
        met = connect_to_store(world, purpose, address_file, init_method, timeout)
    me = Registration(
        host=hostname(),
        pid=str(os.getpid()),
        device=device.type,
        backend=backend,
        gpu=gpu_uuid(device),
        at=time.time(),
        local_ip=met.local_ip,
        rank_0_ip=met.rank_0_ip,
    )
    try:
        if world.rank == 0:
            met.store.set("purpose", purpose)
            met.store.set("seal", seal.fingerprint)
        if (other := met.store.get("purpose").decode()) != purpose:
            raise ConfigError(
                f"{world}: two jobs use {met.address}: this one ({purpose}) and another ({other}); give each its own "
                "port, or none"
            )
        if world.rank:
            seal = _load_seal(world, secret, met.store.get("seal").decode(), timeout)
        mine, store = json.dumps(me), SealedStore(met.store, seal)
        if (first := store.compare_set(registration_key(world.rank), "", mine).decode()) != mine:
            places = " and ".join(f"process {one['pid']} on {one['host']}" for one in (json.loads(first), me))
            raise ConfigError(
                f"{world}: two processes claim rank {world.rank}: {places}; give each process its own rank"
            )
    except dist.DistError as error:
        raise MeetingError(f"{world}: rank 0 on {world.host_of(0)} is gone: {first_line(error)}") from error
    files = [file for file in (secret, met.address_file) if file is not None and world.rank == 0]
    return Group(world, met.store, device, backend, met.address, seal, files)


def secret_file(address_file: Path) -> Path:
    """Where rank 0 leaves the secret of the attempt's seal until all ranks have read it."""
    return address_file.with_suffix(".key")


def _load_seal(world: World, file: Path, fingerprint: str, timeout: timedelta) -> Seal:
    """The seal that rank 0 has made. Raises MeetingError when this host does not see it in time."""
    try:
        seal = Seal.load(file, fingerprint, timeout, world.size)
        why = "does this host see its disk, or was this rank started twice?"
    except OSError as error:
        seal, why = None, str(error.strerror)
    if seal is None:
        raise MeetingError(
            f"{world}: rank 0 on {world.host_of(0)} left this attempt's secret in {file}, which {hostname()} did not "
            f"find within {timeout.seconds} s: {why}"
        )
    return seal


def _raise_open_files_limit() -> None:
    """Allow as many open files as the system does.

    Each rank costs rank 0 seven connections, and every other rank one of gloo's. A shell's usual limit of 1,024 would
    be too low for 150 ranks.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _shorten_name_lookups() -> None:
    """Limit each name server query to 1 s.

    Torch's store looks up the name of each address that connects to it, in its only thread. A lost query would delay
    all ranks by 5 s, a name server that is down by half a minute (resolv.conf(5)).
    """
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
