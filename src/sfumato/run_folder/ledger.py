"""The record of every release of a run, which nobody can shorten or alter unnoticed."""

import fcntl
import hashlib
import hmac
import io
import json
import os
import weakref
from pathlib import Path
from typing import Any

from sfumato.errors import InputError, MachineError, is_from_elsewhere
from sfumato.randomness import canonical, subkey
from sfumato.run_folder.files import (
    NO_FILE,
    is_there,
    machine_faults,
    read_json,
    reading_faults,
    sync_folder,
    write_json,
)
from sfumato.run_folder.key_file import KEY_FILE
from sfumato.run_folder.locks import lock
from sfumato.run_folder.process import this_process

GENESIS = "0" * 64
_all: "weakref.WeakSet[Ledger]" = weakref.WeakSet()


class Ledger:
    """Append-only record of every release, chained by hashes.

    Each line holds the hash of the line before and its own. A line is on disk, synced,
    before the update that it names is applied, so that no fault lowers the count. A hash
    chain alone cannot show that whole last lines were removed. So the last line is kept in a
    second file, ``ledger.head``, authenticated under the run's key and written first: that file
    is at most one line ahead, and then gives the ledger the line that a crash kept from it.
    """

    def __init__(self, path: Path, lines: list[dict[str, Any]], size: int, torn: bytes = b"") -> None:
        self.path = path
        self.lines = lines
        # How many lines the ledger's file has, and in how many bytes; there may be one more.
        # One value, set at once: an interrupt (Ctrl-C, tried again) falls before or after.
        self._on_disk = len(lines), size
        self._torn = torn  # what follows: a part of a line, which a crash left
        # It closes itself: where a signal falls as `__del__` begins, Python runs nothing of that.
        self._file: io.FileIO | None = None
        self._is_closed = False
        self._process = this_process()
        _all.add(self)
        self._key: bytes | None = None

    @classmethod
    def open(cls, path: Path, *, exclusive: bool = False) -> "Ledger":
        """Reads and checks a ledger; an unfinished last line (a crash while it was written) is left
        out.

        Args:
            path: May be absent: an empty ledger.
            exclusive: To append, once `appends_under` has the key; no other process may do so at
                the same time.

        Raises:
            InputError: If a line was altered, lines are missing between others, or another
                process appends to it.
            MachineError: If it cannot be written.
        """
        process = this_process()  # before there is a descriptor: one that is forked amid this shares it, and the lock
        with machine_faults(path):
            if path.exists() and not path.is_file():
                raise InputError(f"{path} is no file. Give the folder of a run that this tool wrote.")
        if exclusive:
            with machine_faults(path):
                file = io.FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644))
            try:
                if not lock(file.fileno(), path):
                    raise InputError(
                        f"another process is training in {path.parent}, or this one is, by an object that was not "
                        "closed. Wait for it to end, or stop it first."
                    )
                with machine_faults(path):
                    sync_folder(path.parent)
                ledger = cls.open(path)
            except BaseException:
                file.close()
                raise
            ledger._file, ledger._process = file, process
            return ledger
        try:
            content = path.read_bytes()
        except OSError as error:
            if error.errno is None or is_from_elsewhere(error):
                raise
            if not isinstance(error, FileNotFoundError):
                raise InputError(f"{path} cannot be read: {error.strerror}. Make it readable.") from None
            content = b""
        *whole, torn = content.split(b"\n")
        lines: list[dict[str, Any]] = []
        head = GENESIS
        for number, raw in enumerate(whole, start=1):
            line = _intact(raw, head)
            if line is None:
                raise InputError(
                    f"{path}, line {number}, does not follow from the lines before it: the ledger "
                    "was altered or damaged, so what was spent is not known. Restore the file "
                    "from a copy; without one, this run's epsilon cannot be stated."
                )
            head = line["hash"]
            lines.append(line)
        return cls(path, lines, len(content) - len(torn), torn)

    @property
    def head(self) -> str:
        return self.lines[-1]["hash"] if self.lines else GENESIS

    def head_at(self, count: int) -> str:
        """The head when the ledger had ``count`` lines."""
        return self.lines[count - 1]["hash"] if count else GENESIS

    def appends_under(self, key: bytes) -> None:
        """Takes the run's key, and a line that the head's file has and the ledger has not. Nothing
        is written yet.

        Raises:
            InputError: If the head's file is missing, not of this key, or not of this ledger.
            MachineError: If it cannot be read.
        """
        self._key = subkey(key, "ledger head")
        path = self.head_path
        restore = (
            "so what was spent is not known. Restore both files from one copy since which nothing was released, or "
            "start a new run; the epsilons of both add up."
        )
        if not is_there(path):
            if self.lines:
                raise InputError(f"{path} is missing: lines of {self.path} may be, too, {restore}")
            return
        count, line = self._authentic_head()
        if line is None:
            raise InputError(f"{path} was altered or damaged, or it or the file {KEY_FILE} is another run's, {restore}")
        if (count, line["prev"]) == (len(self.lines) + 1, self.head):
            self.lines.append(line)
        elif (count, line["hash"]) != (len(self.lines), self.head):
            lack = (
                f"{self.path} has not the {count} lines that {path.name} states: "
                "lines were removed or are another copy's"
            )
            raise InputError(f"{lack}, {restore}")

    def _authentic_head(self) -> tuple[Any, dict[str, Any] | None]:
        """How many lines there are, by the head's file, and the last one; None where the file is not of the key."""
        try:
            stated = read_json(self.head_path)
            facts: dict[str, Any] = stated if isinstance(stated, dict) else {}
            count, line, mac = (facts.get(name) for name in ("lines", "line", "mac"))
            own = self._head_mac(count, line)
        except (ValueError, RecursionError) as error:  # damaged, or with numbers that are none
            if is_from_elsewhere(error):
                raise
            return 0, None
        authentic = isinstance(mac, str) and hmac.compare_digest(mac.encode("utf-8", "replace"), own.encode())
        return count, line if isinstance(line, dict) and authentic else None

    def refuse_another_head(self) -> None:
        """Compares with the count and the last line that the head's file states, where there is no
        key to authenticate it.

        Raises:
            InputError: If they differ, or the file is missing or damaged.
        """
        stated = read_json(self.head_path)
        if (
            not isinstance(stated, dict)
            or not self.lines
            or (stated.get("lines"), stated.get("line")) != (len(self.lines), self.lines[-1])
        ):
            raise InputError(
                f"{self.head_path} states another number of lines or another last line than "
                f"{self.path} has: lines were removed, or one of the two is another copy's. "
                "Restore the folder from a copy."
            )

    def append(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Adds a line and returns it, once it is on disk.

        Raises:
            MachineError: If it cannot be written; the update must then not be applied.
        """
        self.settle()
        assert self._file is not None, "opened to read only"
        line = chained_line(entry, self.head)
        self.lines.append(line)  # counted from here on, whatever stops what follows
        self.settle()
        return line

    def settle(self) -> None:
        """Writes the line that the files lack, if there is one: the head's file first, and again where it has
        it.

        Raises:
            MachineError: If it cannot be written.
        """
        if this_process() != self._process:
            raise MachineError(f"{self.path} is for the process that opened it. End the one forked off it.")
        count, size = self._on_disk
        assert not self._is_closed or count == len(self.lines), "closed"
        if self._file is not None:
            self._require_place(self._file.fileno(), size)
        if count == len(self.lines):
            return
        assert self._file is not None, "opened to read only"
        entry = self.lines[count]
        head = {"lines": count + 1, "line": entry, "mac": self._head_mac(count + 1, entry)}
        write_json(self.head_path, head)
        line = data = _as_bytes(entry)
        with machine_faults(self.path):
            descriptor = self._file.fileno()
            os.ftruncate(descriptor, size)  # a part of a line
            os.lseek(descriptor, size, os.SEEK_SET)
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        self._on_disk = count + 1, size + len(line)

    def _require_place(self, descriptor: int, size: int) -> None:
        """Raises MachineError if what lies at the path is not the file that is written to: a folder that was
        moved, another working folder, where the files beside it would be another run's; or a file that was cut,
        or that somebody else wrote to.
        """
        with machine_faults(self.path):
            own = os.fstat(descriptor)
            beyond = os.pread(descriptor, max(0, own.st_size - size), size)
        try:
            with reading_faults(self.path):
                there = os.stat(self.path)
        except NO_FILE as error:
            if is_from_elsewhere(error):
                raise
            there = None
        if there is None or (there.st_dev, there.st_ino) != (own.st_dev, own.st_ino) or own.st_size < size:
            raise MachineError(
                f"{self.path} was moved, deleted or replaced while it was in use, so nothing more is released. Put it "
                "back as it was, and open its folder again."
            )
        pending = b"".join(map(_as_bytes, self.lines[self._on_disk[0] :]))
        if beyond != self._torn and not pending.startswith(beyond):
            raise MachineError(
                f"{self.path} was written to by something else while it was in use, so nothing more is released: what "
                "was spent may be more than is known here. Find out what wrote there."
            )

    @property
    def head_path(self) -> Path:
        return self.path.with_name("ledger.head")

    def _head_mac(self, count: Any, line: Any) -> str:
        assert self._key is not None, "the key is not known yet"
        return hmac.digest(self._key, canonical([count, line]), "sha256").hex()

    def close(self) -> None:
        self._is_closed = True  # first: what is interrupted further down goes on without the lock otherwise
        file = self._file
        if file is not None:
            try:
                with machine_faults(self.path):
                    if this_process() == self._process:  # one that was forked by no Python code would hold the lock
                        fcntl.flock(file, fcntl.LOCK_UN)
            finally:
                self._file = None
                with machine_faults(self.path):
                    file.close()

    def __del__(self) -> None:
        # An interrupt may fall between the opening of the file and whoever would close it, or in here.
        for _ in range(2):
            try:  # not by contextlib, which is gone when the interpreter ends
                self.close()
            except BaseException:
                pass

    @property
    def is_open(self) -> bool:
        """To append. One whose closing was interrupted is not; `close` is called again."""
        return self._file is not None and not self._is_closed


def is_in_use(path: Path) -> bool:
    """Whether a process appends to this ledger now; a process that was killed does not."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def chained_line(entry: dict[str, Any], head: str) -> dict[str, Any]:
    """The line of a ledger that follows ``head``, the hash of the line before it."""
    line = {**entry, "prev": head}
    return {**line, "hash": _line_hash(line)}


def _intact(raw: bytes, head: str) -> dict[str, Any] | None:
    """A line that follows ``head``; None where it does not, or is none."""
    try:
        line = json.loads(raw)
        follows = isinstance(line, dict) and line.get("prev") == head and line.get("hash") == _line_hash(line)
    except (ValueError, RecursionError) as error:
        if is_from_elsewhere(error):
            raise
        return None
    return line if follows else None


def _as_bytes(line: dict[str, Any]) -> bytes:
    return (json.dumps(line, allow_nan=False) + "\n").encode()


def _line_hash(line: dict[str, Any]) -> str:
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _leave_to_the_parent() -> None:
    """In a forked process: one that lives longer than its parent would hold the lock. The parent's stays."""
    for ledger in list(_all):
        file, ledger._file = ledger._file, None
        if file is not None:
            file.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)
