"""A file system that shows a folder as a client of a network file system does: `python -m tests.support.caching_client
FOLDER POINT SECONDS SECONDS` mounts FOLDER on POINT. Several such mounts of one folder are several clients.

What NFS clients do, and what breaks programs that were only tried on one machine (nfs(5), "DATA AND METADATA
COHERENCE"; fs/nfs/dir.c of Linux):

    * A name that was looked up is remembered for the first SECONDS, the absence of a name too. So are the names in a
      folder that was listed, and the attributes of a file. What other clients create, rename, delete or let grow is not
      seen.
    * A client that itself changes a folder (creates, renames or deletes a name there) looks at that folder anew.
    * Whoever opens a file sees what all those had written who have closed or fsynced it before (close-to-open), even if
      another client has replaced or deleted the file. What was written and is still open stays with this client for up
      to the second SECONDS.
    * An operation that must not go wrong (create exclusively, rename, mkdir) is done by the server, and its refusal
      makes the client forget what it believed about that name.
    * flock holds between clients. Whoever gets a lock sees what was written under it.

A real client refreshes a folder on some more occasions (when it opens the folder to list it, say); this one does not,
as other file systems do not either. All is decided in `Client.handle`, through which each operation goes, with the pid
of the process that asked: the place for rules by which an operation fails, stalls or answers late.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import stat
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from laststep.ranks.process import die_with_parent

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


ROOT = 1  # the kernel's number of the topmost folder
POLL_S = 0.02
WRITE_BACK_ROUND_S = 0.25
_OF_FILE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR | os.O_APPEND
# SETATTR, which fields are set
_MODE, _UID, _GID, _SIZE, _ATIME, _MTIME, _FH, _ATIME_NOW, _MTIME_NOW = 1, 2, 4, 8, 16, 32, 64, 128, 256
_FLOCKED = 1  # SETLK, not fcntl's locks, which stay in this client's kernel
UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2


@dataclass
class Node:
    """A file or folder, by a descriptor that also holds one that is deleted (O_PATH)."""

    number: int
    descriptor: int
    place: tuple[Node, bytes] | None = None  # the folder and the name by which it was looked up last
    lookups: int = 0  # that the kernel remembers
    attributes: os.stat_result | None = None
    until: float = 0.0  # these attributes are believed
    names: dict[bytes, tuple[Node | None, float]] = field(default_factory=dict)  # in a folder, believed until then
    listing: tuple[list[tuple[bytes, int, int]], float] | None = None  # of a folder, believed until then
    handles: set[Handle] = field(default_factory=set)  # through which it is written

    @property
    def path(self) -> str:
        """A path that leads to it."""
        return f"/proc/self/fd/{self.descriptor}"


@dataclass(eq=False)
class Handle:
    """An open file or folder."""

    node: Node
    descriptor: int = -1
    listing: list[tuple[bytes, int, int]] = field(default_factory=list)
    dirty: bytearray = field(default_factory=bytearray)  # written here, and not sent to the server
    dirty_at: int = 0  # where in the file it begins
    dirty_since: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, data: bytes, offset: int) -> None:
        """Keep what was written."""
        with self.lock:
            if self.dirty and offset != self.dirty_at + len(self.dirty):
                self._send()
            if not self.dirty:
                self.dirty_at, self.dirty_since = offset, time.monotonic()
            self.dirty += data

    def send(self) -> None:
        """Send to the server what was written. Raises OSError."""
        with self.lock:
            self._send()

    def _send(self) -> None:
        data, self.dirty = memoryview(self.dirty), bytearray()
        while data:  # a file that was opened to append appends, whatever the offset
            count = os.pwrite(self.descriptor, data, self.dirty_at)
            data, self.dirty_at = data[count:], self.dirty_at + count


class Client:
    """A client's view of a folder."""

    def __init__(self, folder: Path, cache_s: float, write_back_s: float) -> None:
        self._cache_s, self._write_back_s = cache_s, write_back_s
        self._lock = threading.RLock()  # guards the nodes and what is believed of them
        self._nodes: dict[int, Node] = {ROOT: Node(ROOT, os.open(folder, os.O_PATH))}
        self._numbers: dict[tuple[int, int], int] = {}  # of nodes, by device and inode
        self._next_number = ROOT + 1
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._interrupted: set[int] = set()  # requests whose process was signalled
        self._do: dict[Op, Callable[[Request, Node], bytes]] = {
            Op.LOOKUP: self._look_up,
            Op.GETATTR: self._get_attributes,
            Op.SETATTR: self._set_attributes,
            Op.READLINK: lambda request, node: os.fsencode(os.readlink(b"", dir_fd=node.descriptor)),
            Op.SYMLINK: self._symlink,
            Op.MKNOD: self._make_node,
            Op.MKDIR: self._make_folder,
            Op.UNLINK: lambda request, node: self._remove(node, request.names()[0], os.unlink),
            Op.RMDIR: lambda request, node: self._remove(node, request.names()[0], os.rmdir),
            Op.RENAME: lambda request, node: self._rename(request, node, "Q"),
            Op.RENAME2: lambda request, node: self._rename(request, node, "QII"),
            Op.LINK: self._link,
            Op.OPEN: self._open,
            Op.CREATE: self._create,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.FLUSH: self._flush,
            Op.FSYNC: self._fsync,
            Op.RELEASE: self._release,
            Op.OPENDIR: self._open_folder,
            Op.READDIR: self._read_folder,
            Op.RELEASEDIR: self._release,
            Op.FSYNCDIR: self._fsync_folder,
            Op.STATFS: self._stat_file_system,
            Op.SETLK: self._set_lock,
            Op.SETLKW: self._set_lock,
            Op.DESTROY: lambda request, node: b"",
        }

    def handle(self, request: Request) -> bytes:
        """Do what a process asks for. Raises OSError."""
        if request.op is Op.INTERRUPT:
            self._interrupted.add(*request.unpack("Q"))
            return b""
        if request.op in (Op.FORGET, Op.BATCH_FORGET):
            return self._forget(request)
        node = self._nodes[request.node or ROOT]
        return self._do[request.op](request, node)

    def write_back(self) -> None:
        """Send to the server what was written long ago, again and again."""
        while True:
            time.sleep(WRITE_BACK_ROUND_S)
            before = time.monotonic() - self._write_back_s
            with self._lock:
                handles = list(self._handles.values())
            for handle in handles:
                if handle.dirty and handle.dirty_since <= before:
                    with suppress(OSError):
                        handle.send()

    # What is believed, and for how long

    def _until(self) -> float:
        return time.monotonic() + self._cache_s

    def _changed(self, *folders: Node) -> None:
        """This client has changed these folders: it looks at them anew."""
        with self._lock:
            for folder in folders:
                folder.names.clear()
                folder.listing = folder.attributes = None

    def _ask(self, folder: Node, name: bytes) -> Node | None:
        """The node that a name stands for on the server."""
        try:
            descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder.descriptor)
        except FileNotFoundError:
            return None
        found = os.fstat(descriptor)
        with self._lock:
            number = self._numbers.get((found.st_dev, found.st_ino))
            if number is None:
                number, self._next_number = self._next_number, self._next_number + 1
                self._numbers[found.st_dev, found.st_ino] = number
                self._nodes[number] = Node(number, descriptor)
            else:
                os.close(descriptor)
            node = self._nodes[number]
            node.attributes, node.until = found, self._until()
            return node

    def _find(self, folder: Node, name: bytes) -> Node | None:
        """The node that a name stands for, as this client believes."""
        with self._lock:
            node, until = folder.names.get(name, (None, 0.0))
            if time.monotonic() >= until:
                node = self._ask(folder, name)
                folder.names[name] = node, self._until()
            if node is not None:
                node.place = folder, name
            return node

    def _attributes(self, node: Node) -> bytes:
        """The attributes of a node, as this client believes; what it has written itself is sent first."""
        self._send(node)
        with self._lock:
            if node.attributes is None or time.monotonic() >= node.until:
                self._refresh(node)
            assert node.attributes is not None
            return attributes(node.attributes)

    def _refresh(self, node: Node) -> os.stat_result:
        with self._lock:
            node.attributes, node.until = os.fstat(node.descriptor), self._until()
            return node.attributes

    def _send(self, node: Node) -> None:
        with self._lock:
            handles = [handle for handle in node.handles if handle.dirty]
        for handle in handles:
            handle.send()
        if handles:
            self._refresh(node)

    def _entry(self, folder: Node, name: bytes) -> bytes:
        """The answer that names what stands under a name. Raises FileNotFoundError."""
        with self._lock:
            node = self._find(folder, name)
            if node is None:
                raise FileNotFoundError(errno.ENOENT, "no such name")
            answer = entry(node.number, self._attributes(node))
            node.lookups += 1
            return answer

    def _change(self, work: Callable[[], object], *names: tuple[Node, bytes]) -> None:
        """Change folders. A refusal makes the client forget these names there. Raises OSError."""
        try:
            work()
        except OSError:
            with self._lock:
                for folder, name in names:
                    folder.names.pop(name, None)
            raise
        self._changed(*(folder for folder, _ in names))

    # Names

    def _look_up(self, request: Request, node: Node) -> bytes:
        return self._entry(node, request.names()[0])

    def _forget(self, request: Request) -> bytes:
        if request.op is Op.FORGET:
            counts = [(request.node, *request.unpack("Q"))]
        else:
            number, _ = request.unpack("II")
            counts = [struct.unpack_from("<QQ", request.body, 8 + 16 * each) for each in range(number)]
        with self._lock:
            for number, count in counts:
                node = self._nodes[number]
                node.lookups -= count
                found = os.fstat(node.descriptor)
                # The beliefs about a folder last as long as the folder, whatever the kernel forgets.
                if node.lookups or number == ROOT or (stat.S_ISDIR(found.st_mode) and found.st_nlink):
                    continue
                if node.place is not None and node.place[0].names.get(node.place[1], (None, 0.0))[0] is node:
                    del node.place[0].names[node.place[1]]
                del self._nodes[number], self._numbers[found.st_dev, found.st_ino]
                os.close(node.descriptor)
        return b""

    def _symlink(self, request: Request, node: Node) -> bytes:
        name, target = request.names()
        self._change(lambda: os.symlink(target, name, dir_fd=node.descriptor), (node, name))
        return self._entry(node, name)

    def _make_node(self, request: Request, node: Node) -> bytes:
        mode, device, mask, _ = request.unpack("IIII")
        (name,) = request.names("IIII")
        self._change(lambda: os.mknod(name, mode & ~mask, device, dir_fd=node.descriptor), (node, name))
        return self._entry(node, name)

    def _make_folder(self, request: Request, node: Node) -> bytes:
        mode, mask = request.unpack("II")
        (name,) = request.names("II")
        self._change(lambda: os.mkdir(name, mode & ~mask, dir_fd=node.descriptor), (node, name))
        return self._entry(node, name)

    def _remove(self, folder: Node, name: bytes, remove: Callable[..., None]) -> bytes:
        self._change(lambda: remove(name, dir_fd=folder.descriptor), (folder, name))
        return b""

    def _rename(self, request: Request, folder: Node, layout: str) -> bytes:
        number, *flags = request.unpack(layout)
        if any(flags):  # of renameat2
            raise OSError(errno.EINVAL, "not supported")
        before, after = request.names(layout)
        target = self._nodes[number]
        where = {"src_dir_fd": folder.descriptor, "dst_dir_fd": target.descriptor}
        self._change(lambda: os.rename(before, after, **where), (folder, before), (target, after))
        return b""

    def _link(self, request: Request, folder: Node) -> bytes:
        (number,) = request.unpack("Q")
        (name,) = request.names("Q")
        file = self._nodes[number]
        self._send(file)
        self._change(
            lambda: os.link(file.path, name, dst_dir_fd=folder.descriptor, follow_symlinks=True), (folder, name)
        )
        return self._entry(folder, name)

    # Attributes

    def _get_attributes(self, request: Request, node: Node) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _set_attributes(self, request: Request, node: Node) -> bytes:
        self._send(node)
        words = request.unpack("IIQQQQQQIIIIIIII")
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, _, uid, gid, _ = words
        if valid & _MODE:
            os.chmod(node.path, stat.S_IMODE(mode))
        if valid & (_UID | _GID):
            os.chown(node.path, uid if valid & _UID else -1, gid if valid & _GID else -1)
        if valid & _SIZE:
            os.truncate(self._handles[handle].descriptor if valid & _FH else node.path, size)
        if valid & (_ATIME | _MTIME):
            self._set_times(node, valid, atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
        self._refresh(node)
        return self._get_attributes(request, node)

    def _set_times(self, node: Node, valid: int, atime: int, mtime: int) -> None:
        before, now = os.stat(node.path), time.time_ns()
        times = []
        for own, at_now, wanted, old in (
            (_ATIME, _ATIME_NOW, atime, before.st_atime_ns),
            (_MTIME, _MTIME_NOW, mtime, before.st_mtime_ns),
        ):
            times.append(old if not valid & own else now if valid & at_now else wanted)
        os.utime(node.path, ns=(times[0], times[1]))

    def _stat_file_system(self, request: Request, node: Node) -> bytes:
        found = os.statvfs(node.path)
        counts = (found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree)
        return struct.pack("<5Q4I24x", *counts, found.f_bsize, found.f_namemax, found.f_frsize, 0)

    # Files

    def _open(self, request: Request, node: Node) -> bytes:
        """Whoever opens a file sees its newest content, or the file that stands there now."""
        flags, _ = request.unpack("II")
        self._send(node)
        if node.place is not None:
            folder, name = node.place
            if not _stands_at(folder, name, node):  # deleted or replaced: the kernel looks the name up again
                with self._lock:
                    folder.names.pop(name, None)
                raise OSError(errno.ESTALE, "the file was replaced")
        self._refresh(node)
        return self._opened(node, os.open(node.path, flags & _OF_FILE), flags)

    def _create(self, request: Request, folder: Node) -> bytes:
        flags, mode, mask, _ = request.unpack("IIII")
        (name,) = request.names("IIII")
        opened: list[int] = []

        def create() -> None:
            opened.append(
                os.open(name, flags & _OF_FILE | os.O_CREAT | os.O_EXCL, mode & ~mask, dir_fd=folder.descriptor)
            )

        try:
            self._change(create, (folder, name))
        except FileExistsError:  # another client has created it, which changes nothing in the folder
            if flags & os.O_EXCL:
                raise
            opened.append(os.open(name, flags & _OF_FILE, dir_fd=folder.descriptor))
        try:
            found = self._entry(folder, name)
        except OSError:  # deleted by another client meanwhile
            os.close(opened[0])
            raise
        (number,) = struct.unpack_from("<Q", found)
        return found + self._opened(self._nodes[number], opened[0], flags)

    def _opened(self, node: Node, descriptor: int, flags: int) -> bytes:
        handle = Handle(node, descriptor)
        with self._lock:
            if flags & os.O_ACCMODE != os.O_RDONLY:
                node.handles.add(handle)
            return self._numbered(handle)

    def _numbered(self, handle: Handle) -> bytes:
        with self._lock:
            number, self._next_handle = self._next_handle, self._next_handle + 1
            self._handles[number] = handle
        return struct.pack("<QIi", number, 0, 0)

    def _read(self, request: Request, node: Node) -> bytes:
        handle, offset, size = request.unpack("QQI")
        self._send(node)
        return os.pread(self._handles[handle].descriptor, size, offset)

    def _write(self, request: Request, node: Node) -> bytes:
        handle, offset, size = request.unpack("QQI")
        self._handles[handle].write(request.body[40 : 40 + size], offset)
        return struct.pack("<II", size, 0)

    def _flush(self, request: Request, node: Node) -> bytes:
        self._send(node)
        return b""

    def _fsync(self, request: Request, node: Node) -> bytes:
        (handle,) = request.unpack("Q")
        self._send(node)
        os.fsync(self._handles[handle].descriptor)
        return b""

    def _release(self, request: Request, node: Node) -> bytes:
        (number,) = request.unpack("Q")
        with self._lock:
            handle = self._handles.pop(number)
        with suppress(OSError):
            handle.send()
        with self._lock:
            node.handles.discard(handle)
        if handle.descriptor >= 0:
            os.close(handle.descriptor)  # which frees its lock
        return b""

    # Folders

    def _open_folder(self, request: Request, node: Node) -> bytes:
        return self._numbered(Handle(node))

    def _read_folder(self, request: Request, node: Node) -> bytes:
        number, offset, size = request.unpack("QQI")
        handle = self._handles[number]
        if offset == 0:
            with self._lock:
                if node.listing is None or time.monotonic() >= node.listing[1]:
                    node.listing = _list(node), self._until()
                handle.listing = node.listing[0]
        return names_from(handle.listing, offset, size)

    def _fsync_folder(self, request: Request, node: Node) -> bytes:
        descriptor = os.open(node.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return b""

    # Locks

    def _set_lock(self, request: Request, node: Node) -> bytes:
        """flock, on the file that is open on the server. Polls, so that a signal ends the wait."""
        handle, _, _, _, kind, _, how, _ = request.unpack("QQQQIIII")
        if not how & _FLOCKED:
            raise OSError(errno.ENOSYS, "only flock")
        what = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX, fcntl.F_UNLCK: fcntl.LOCK_UN}[kind]
        if what == fcntl.LOCK_UN:
            self._send(node)
        while True:
            try:
                fcntl.flock(self._handles[handle].descriptor, what | fcntl.LOCK_NB)
            except BlockingIOError:
                if request.op is Op.SETLK:
                    raise
                if request.unique in self._interrupted:
                    self._interrupted.discard(request.unique)
                    raise InterruptedError(errno.EINTR, "a signal") from None
                time.sleep(POLL_S)
            else:
                self._refresh(node)
                return b""


def _stands_at(folder: Node, name: bytes, node: Node) -> bool:
    try:
        found = os.stat(name, dir_fd=folder.descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(node.descriptor))


def _list(node: Node) -> list[tuple[bytes, int, int]]:
    descriptor = os.open(node.path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(descriptor) as found:
            names = [(os.fsencode(each.name), each.inode(), _kind(each)) for each in found]
    finally:
        os.close(descriptor)
    return [(b".", 1, stat.S_IFDIR), (b"..", 1, stat.S_IFDIR), *names]


def _kind(each: os.DirEntry[str]) -> int:
    if each.is_symlink():
        return stat.S_IFLNK
    return stat.S_IFDIR if each.is_dir(follow_symlinks=False) else stat.S_IFREG


def main(folder: str, point: str, cache_s: str, write_back_s: str) -> None:
    """Mount, say so, and answer until the file system is unmounted."""
    die_with_parent(signal.SIGKILL)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0)  # the kernel has applied that of the process
    client = Client(Path(folder), float(cache_s), float(write_back_s))
    mount = Mount(Path(point), client.handle)
    threading.Thread(target=client.write_back, daemon=True).start()
    print("mounted", flush=True)
    mount.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
