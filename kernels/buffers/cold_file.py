"""The file with the older transitions of an `MmapReplayBuffer`: its format and lifetime.

Format: one page of header, then blocks of equal size, each a run of records as in memory. The header is
``RLOXCOLD``, three little-endian uint32 (version, length and CRC-32 of what follows) and a JSON object:

=========== ==================================================================================================
id          16 random hexadecimal digits, by which checkpoints refer to the file
pid         the process that opened the file last, for messages
created     time of creation in seconds since 1970, for messages
record      layout of a record, as text
stride      size of a record in bytes
block_rows  records per block
n_blocks    blocks in the file (which is sparse: only blocks that were written take disk space)
named       serial numbers of the saved states that refer to the file and are kept intact, newest last
serial      the last serial number used
=========== ==================================================================================================

Lifetime: the process that uses a file holds an exclusive ``flock`` on it, which the operating system releases however
the process ends. A file whose lock can be taken therefore belongs to no living process. Blocks are written with
``pwrite`` and read through a read-only map: on a full disk, a write through a map kills the process, while ``pwrite``
returns an error.
"""

import json
import mmap
import os
import secrets
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Iterable

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAGIC = b"RLOXCOLD"
VERSION = 1
PAGE = 4096
_PREFIX = struct.Struct("<8sIII")
_WHERE = "MmapReplayBuffer"


def read_header(fd: int, path: str) -> dict:
    """Return the header of an open cold file. Raises ValueError if it is not a cold file or is damaged."""
    page = os.pread(fd, PAGE, 0)
    if page[:8] != MAGIC or len(page) < PAGE:
        raise ValueError(
            f"{_WHERE}: cold_path must be a cold file of {_WHERE}, got {path!r}, which is not one or was cut short"
        )
    _, version, length, crc = _PREFIX.unpack_from(page)
    if version != VERSION:
        raise ValueError(
            f"{_WHERE}: cold_path must be of format version {VERSION}, got version {version} in {path!r}; use the "
            "release of rlox that wrote it"
        )
    text = page[_PREFIX.size : _PREFIX.size + length]
    if len(text) != length or zlib.crc32(text) != crc:
        raise ValueError(f"{_WHERE}: cold_path must have an intact header, got {path!r}, whose checksum is wrong")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    counts = ("pid", "created", "stride", "block_rows", "n_blocks", "serial")
    if not (
        isinstance(header, dict)
        and all(isinstance(header.get(name), str) for name in ("id", "record"))
        and all(type(header.get(name)) is int and 0 <= header[name] < 1 << 53 for name in counts)
        and isinstance(header.get("named"), list)
        and all(type(serial) is int and 0 <= serial < 1 << 53 for serial in header["named"])
    ):
        raise ValueError(f"{_WHERE}: cold_path must have a header that rlox wrote, got another one in {path!r}")
    return header


def _write_header(fd: int, header: dict) -> None:
    text = json.dumps(header).encode()
    page = _PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text)) + text
    if len(page) > PAGE:
        raise ValueError(f"{_WHERE}: the header must fit in {PAGE} bytes, got {len(page)}")
    os.pwrite(fd, page.ljust(PAGE, b"\0"), 0)


def _require_posix() -> None:
    if fcntl is None:
        raise OSError(f"{_WHERE}: the system must be Linux or macOS, got Windows; use a ReplayBuffer, or WSL")


def _lock(fd: int, path: str) -> bool:
    """Take the lock. Returns False if another process, or another buffer of this process, holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as e:
        raise OSError(
            e.errno, f"{_WHERE}: cold_path must be on a file system with locks (flock): {e.strerror}", path
        ) from e
    return True


def _is_at(fd: int, path: str) -> bool:
    """Return whether `path` is still the file that is open as `fd`."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except OSError:
        return False


def _remove(path: str, may_remove) -> bool:
    """Remove a cold file if no process holds it and `may_remove` accepts its header. Returns whether it was removed."""
    if fcntl is None:
        return False
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):  # do not even open anything else: a FIFO would block
            return False
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        try:
            header = read_header(fd, path)
        except (ValueError, OSError):
            return False
        # Check after taking the lock: meanwhile the file may have got an owner, or its path another file.
        if not _lock(fd, path) or not _is_at(fd, path):
            return False
        header = read_header(fd, path)
        if not may_remove(header):
            return False
        os.unlink(path)
        return True
    finally:
        os.close(fd)


def clean_cold_files(folder: str | os.PathLike, named: Iterable[str] | None = None) -> list[str]:
    """Remove the cold files in `folder` that a killed process left behind and no checkpoint needs.

    Removes regular files directly in `folder` that have an intact cold-file header, are not locked by a living
    process, and are not referred to by a checkpoint. Keeps everything else: other files, files in use, and files with
    a damaged header.

    Parameters
    ----------
    folder
        The folder of a run.
    named
        Ids of the files to keep: ``state["cold_id"]`` of every checkpoint. None keeps every file that a state has ever
        referred to; `MmapReplayBuffer` does this in its own folder by itself.

    Returns
    -------
    list of str
        The paths removed, sorted.

    Raises
    ------
    FileNotFoundError, NotADirectoryError, PermissionError
        If `folder` cannot be listed.
    TypeError
        If `named` is a single string or contains anything but strings.
    """
    if isinstance(named, (str, bytes)):
        raise TypeError(f"clean_cold_files: named must be a collection of ids, got {named!r}; pass [{named!r}]")
    keep = None if named is None else set(named)
    for id_ in keep or ():
        if not isinstance(id_, str):
            raise TypeError(f"clean_cold_files: named must contain strings, got {id_!r}")

    def may_remove(header: dict) -> bool:
        return not header["named"] if keep is None else header["id"] not in keep

    folder = os.fsdecode(folder)
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    return [path for path in paths if _remove(path, may_remove)]


def _release(fd: int, path: str, pid: int, keep: list[bool]) -> None:
    """Remove and close a file: the last step of its lifetime, on close, garbage collection or interpreter exit."""
    try:
        if os.getpid() == pid and not keep[0] and _is_at(fd, path):
            os.unlink(path)
    except OSError:
        pass  # the folder may be gone already, and there is no caller to report it to
    finally:
        os.close(fd)


class ColdFile:
    """An open cold file, locked by this process. Created by `create` or `adopt`.

    Attributes
    ----------
    path, id
        Path of the file, and its id in checkpoints.
    header
        The header as it is on disk.
    rows
        (n_blocks * block_rows * stride,) uint8, read-only: the mapped blocks of the file. A reference to this array
        keeps the file mapped, for example while a thread still reads from it.
    """

    def __init__(self, fd: int, path: str, header: dict) -> None:
        self.fd = fd
        self.path = path
        self.header = header
        self.id: str = header["id"]
        self.pid = os.getpid()
        self.size = PAGE + header["n_blocks"] * header["block_rows"] * header["stride"]
        self._block_bytes = header["block_rows"] * header["stride"]
        self._keep = [bool(header["named"])]
        mapped = mmap.mmap(fd, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
        # Samples are random: reading ahead would fetch pages that are not needed.
        if hasattr(mapped, "madvise"):
            mapped.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(mapped, np.uint8)[PAGE:]
        # Last, so that the caller still owns `fd` after an error in this function.
        self._finalizer = weakref.finalize(self, _release, fd, path, self.pid, self._keep)

    @classmethod
    def create(
        cls, cold_path: str | os.PathLike, record: str, stride: int, block_rows: int, n_blocks: int, preallocate: int
    ) -> "ColdFile":
        """Create a sparse file at `cold_path`, or as ``replay-<id>.cold`` if that is a folder.

        The disk space of `preallocate` blocks is taken at once. An existing file is replaced only if it is a cold file
        whose process is dead and that no state has ever referred to.
        """
        _require_posix()
        try:
            path = os.path.abspath(os.fsdecode(cold_path))
        except TypeError as e:
            raise TypeError(f"{_WHERE}: cold_path must be a path, got {type(cold_path).__name__}") from e
        if "\0" in path:
            raise ValueError(f"{_WHERE}: cold_path must be a path, got {path!r} with a NUL character")
        id_ = secrets.token_hex(8)
        if os.path.isdir(path):
            clean_cold_files(path)
            path = os.path.join(path, f"replay-{id_}.cold")
        elif os.path.lexists(path):
            _remove(path, lambda header: not header["named"])
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError as e:
            raise FileExistsError(e.errno, _why_in_the_way(path), path) from e
        except OSError as e:
            raise type(e)(
                e.errno, f"{_WHERE}: cold_path must be in an existing, writeable folder: {e.strerror}", path
            ) from e
        header = {
            "id": id_,
            "pid": os.getpid(),
            "created": int(time.time()),
            "record": record,
            "stride": stride,
            "block_rows": block_rows,
            "n_blocks": n_blocks,
            "named": [],
            "serial": 0,
        }
        try:
            _lock(fd, path)
            _write_header(fd, header)
            os.ftruncate(fd, PAGE + n_blocks * block_rows * stride)
            if preallocate and hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(fd, 0, PAGE + preallocate * block_rows * stride)
            return cls(fd, path, header)
        except BaseException as e:
            os.unlink(path)
            os.close(fd)
            if isinstance(e, OSError):
                raise OSError(e.errno, f"{_WHERE}: cold_path must have room for the file: {e.strerror}", path) from e
            raise

    @classmethod
    def adopt(cls, paths: Iterable[str], id_: str, serial: int) -> "ColdFile":
        """Take over the file that a state refers to, from the first of `paths` where it is found.

        Nothing is written yet: `name` makes the state the only one that refers to the file.

        Raises
        ------
        ValueError
            If the file is gone, damaged, cut short or in use, or no longer contains what the state relies on.
        """
        _require_posix()
        damage = None
        for path in paths:
            try:
                if not stat.S_ISREG(os.lstat(path).st_mode):
                    continue
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                header = read_header(fd, path)
                if header["id"] != id_:
                    os.close(fd)
                    continue
                if not _lock(fd, path):
                    raise ValueError(
                        f"{_WHERE}.set_state: cold_path must not be in use, got {path!r}, which process "
                        f"{header['pid']} has open; close that buffer first"
                    )
                if not _is_at(fd, path):  # removed between the two calls
                    os.close(fd)
                    continue
                header = read_header(fd, path)
                if serial not in header["named"]:
                    raise ValueError(
                        f"{_WHERE}.set_state: state must be one of the two newest that refer to {path!r} "
                        f"({header['named']}), got number {serial}, whose transitions may have been overwritten; "
                        "use a newer checkpoint, or save with include_cold=True"
                    )
                size = PAGE + header["n_blocks"] * header["block_rows"] * header["stride"]
                if os.fstat(fd).st_size != size:
                    raise ValueError(
                        f"{_WHERE}.set_state: cold_path must be a complete file of {size} bytes, got "
                        f"{os.fstat(fd).st_size} in {path!r}"
                    )
                return cls(fd, path, header)
            except ValueError as e:
                os.close(fd)
                damage = damage or e
            except BaseException:
                os.close(fd)
                raise
        if damage is not None:
            raise damage
        raise ValueError(
            f"{_WHERE}.set_state: state refers to the cold file {id_}, which must be at one of {list(paths)}, got "
            "nothing there; put the file back, or use a state with include_cold=True"
        )

    def write(self, block: int, parts: list[np.ndarray]) -> None:
        """Write a block, given as consecutive uint8 arrays. Raises OSError if the disk is full or fails."""
        if os.getpid() != self.pid:
            raise ValueError(
                f"{_WHERE}: a buffer must be used in the process that created it, got a fork of process {self.pid}"
            )
        at = PAGE + block * self._block_bytes
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    n = os.pwrite(self.fd, rest, at)
                    at += n
                    rest = rest[n:]
        except OSError as e:
            raise OSError(
                e.errno,
                f"{_WHERE}: cold_path must have room for older transitions: {e.strerror}; free some disk "
                "space and push again what is not stored yet (n_pushed counts what is)",
                self.path,
            ) from e

    def name(self, named: list[int]) -> None:
        """Record durably that the file is kept intact for the states `named`."""
        header = dict(self.header, named=named, pid=self.pid, serial=max([self.header["serial"], *named]))
        try:
            _write_header(self.fd, header)
            os.fsync(self.fd)  # the blocks too, because a checkpoint will rely on them
        except OSError as e:
            raise OSError(
                e.errno, f"{_WHERE}: cold_path must store the older transitions durably: {e.strerror}", self.path
            ) from e
        self.header = header
        self._keep[0] = True

    def close(self, keep: bool | None = None) -> None:
        """Close the file, and remove it unless `keep`; by default it is kept if a state refers to it."""
        if keep is not None:
            self._keep[0] = keep
        self.rows = None
        self._finalizer()


def _why_in_the_way(path: str) -> str:
    """Return a message with the reason why the existing `path` was not replaced, and a remedy."""
    start = f"{_WHERE}: cold_path must be free"
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return f"{start} or a folder, got something else there; choose another path"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as e:
        return f"{start}, got a file that cannot be read: {e.strerror}"
    try:
        header = read_header(fd, path)
        if header["named"] and _lock(fd, path):
            return (
                f"{start}, got a cold file that a saved state refers to ({header['id']}); continue from that state "
                "with MmapReplayBuffer.from_state, or remove the file with clean_cold_files"
            )
        return f"{start}, got the cold file of process {header['pid']}, which is in use; choose another path"
    except (ValueError, OSError):
        return f"{start}, got a file that rlox did not write; choose another path, or remove the file"
    finally:
        os.close(fd)
