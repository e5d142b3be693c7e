"""The kernel's side of a file system in user space: requests read from /dev/fuse, and the answers to them.

A small part of the protocol (linux/include/uapi/linux/fuse.h, version 7.31), which no library in between has to
translate. `tests.support.caching_client` says what the operations do. Needs root: it mounts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

VERSION = 7, 31
MAX_WRITE = 1 << 20
_BUFFER = MAX_WRITE + (64 << 10)
_IN_HEADER, _OUT_HEADER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
LAZILY = 2  # MNT_DETACH
# Flags of INIT: read ahead, flock across clients, fresh pages when a file's time or size has changed, 1 MiB at a time.
_ASYNC_READ, _FLOCK, _BIG_WRITES, _AUTO_INVALIDATE, _MAX_PAGES = 1 << 0, 1 << 10, 1 << 5, 1 << 12, 1 << 22
_libc = ctypes.CDLL(None, use_errno=True)


class Op(IntEnum):
    """The kinds of requests that a file system may answer; the kernel does without the others."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    RENAME2 = 45


# Requests that get no answer.
_SILENT = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)


@dataclass(frozen=True)
class Request:
    """One request: an operation of a process on a node."""

    op: Op
    unique: int
    node: int
    pid: int
    body: bytes

    def unpack(self, layout: str) -> tuple[int, ...]:
        """The fields at the beginning of the body."""
        return struct.unpack_from(f"<{layout}", self.body)

    def names(self, layout: str = "") -> list[bytes]:
        """The names behind fields of this layout."""
        return self.body[struct.calcsize(f"<{layout}") :].split(b"\0")[:-1]


# Answers a request with the bytes that the protocol wants; raises OSError.
Handler = Callable[[Request], bytes]


class Mount:
    """A mount whose requests `serve` hands to `handle`, in several threads."""

    def __init__(self, point: Path, handle: Handler, threads: int = 6) -> None:
        """Mount on the folder `point`. Raises OSError."""
        self._handle, self._threads = handle, threads
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        # As a network file system: not a local disk, for those who look at the kind of the file system.
        if _libc.mount(b"clients", os.fsencode(point), b"fuse.clients", 0, options.encode()):
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number), str(point))

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        helpers = [threading.Thread(target=self._answer_all, daemon=True) for _ in range(self._threads - 1)]
        for helper in helpers:
            helper.start()
        self._answer_all()

    def _answer_all(self) -> None:
        while True:
            try:
                data = os.read(self._device, _BUFFER)
            except InterruptedError:
                continue
            except FileNotFoundError:  # the process that asked was interrupted before we read its request
                continue
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                raise
            _, number, unique, node, _, _, pid, _, _ = _IN_HEADER.unpack_from(data)
            try:
                op = Op(number)
            except ValueError:
                self.answer(unique, errno.ENOSYS)
                continue
            request = Request(op, unique, node, pid, data[_IN_HEADER.size :])
            if op is Op.SETLKW:  # may take as long as another process holds the lock
                threading.Thread(target=self._answer_one, args=(request,), daemon=True).start()
            else:
                self._answer_one(request)

    def _answer_one(self, request: Request) -> None:
        try:
            body = _init(request) if request.op is Op.INIT else self._handle(request)
        except OSError as error:
            self.answer(request.unique, error.errno or errno.EIO)
            return
        except Exception:  # a mistake of ours, which must not look like a hang
            traceback.print_exc()
            self.answer(request.unique, errno.EIO)
            return
        if request.op not in _SILENT:
            self.answer(request.unique, 0, body)

    def answer(self, unique: int, error: int, body: bytes = b"") -> None:
        """Answer a request with an error number, or with 0 and the bytes."""
        try:
            os.write(self._device, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body)
        except FileNotFoundError:  # the process that asked has ended
            pass
        except OSError as failure:
            if failure.errno != errno.ENODEV:
                raise


def _init(request: Request) -> bytes:
    _, _, read_ahead, offered = request.unpack("IIII")
    wanted = _ASYNC_READ | _FLOCK | _BIG_WRITES | _AUTO_INVALIDATE | _MAX_PAGES
    start = struct.pack("<IIIIHHIIHH", *VERSION, read_ahead, wanted & offered, 16, 12, MAX_WRITE, 1, MAX_WRITE >> 12, 0)
    return start.ljust(64, b"\0")


def unmount(point: Path) -> None:
    """Unmount, at once for new requests. Raises OSError."""
    if _libc.umount2(os.fsencode(point), LAZILY):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def entry(node: int, attributes: bytes) -> bytes:
    """The answer that names a node. The kernel keeps none of it: it asks again each time."""
    return struct.pack("<4QII", node, 0, 0, 0, 0, 0) + attributes


def attributes(found: os.stat_result) -> bytes:
    """The attributes of a file."""
    seconds = [nanoseconds // 10**9 for nanoseconds in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    rest = [nanoseconds % 10**9 for nanoseconds in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
    return ATTRIBUTES.pack(
        *(found.st_ino, found.st_size, found.st_blocks, *seconds, *rest, found.st_mode, found.st_nlink),
        *(found.st_uid, found.st_gid, found.st_rdev & 0xFFFFFFFF, 4096, 0),
    )


def names_from(listing: list[tuple[bytes, int, int]], first: int, size: int) -> bytes:
    """As many names of a folder, from the one with this number on, as fit into `size` bytes.

    `listing` has name, inode and mode of each.
    """
    found = b""
    for number, (name, inode, mode) in enumerate(listing[first:], first + 1):
        record = struct.pack("<QQII", inode, number, len(name), stat.S_IFMT(mode) >> 12) + name
        record = record.ljust(-(-len(record) // 8) * 8, b"\0")
        if len(found) + len(record) > size:
            break
        found += record
    return found
