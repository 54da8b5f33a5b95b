"""What a run leaves on disk, written so that no fault loses or alters it."""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sfumato.errors import InputError, MachineError
from sfumato.randomness import canonical, subkey

KEY_FILE = "key"
DATA_ROOT_FILE = "data_root"
GENESIS = "0" * 64


@contextlib.contextmanager
def machine_faults(path: Path) -> Iterator[None]:
    """Turns a failing disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{path} cannot be written: {error.strerror}. What was written before is intact; make room or make it writable, then go on with --resume."
        ) from error


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes a whole file or leaves the old one: a new file, synced, then renamed over it.

    Raises:
        MachineError: If the disk is full, read-only or failing.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with machine_faults(path):
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Writes strict JSON (no NaN, no Infinity) atomically."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), mode)


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run.

    Raises:
        InputError: If it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # lists within lists
        raise InputError(f"{path} is missing or damaged ({type(error).__name__}). Give the folder of a run that this tool wrote.") from None


class JsonLines:
    """An append-only file with one JSON object a line, whose lines may be cut back to a step."""

    def __init__(self, path: Path, mode: int = 0o644) -> None:
        self.path = path
        self.mode = mode

    def append(self, value: dict[str, Any]) -> None:
        with machine_faults(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, self.mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write((json.dumps(value, allow_nan=False) + "\n").encode())

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a torn last one is passed over.

        Raises:
            InputError: If a line is no JSON object of a step.
        """
        lines = []
        if self.path.exists():
            for number, raw in enumerate(self.path.read_bytes().split(b"\n"), start=1):
                try:
                    line = json.loads(raw)
                except ValueError:
                    continue
                except RecursionError:
                    line = None
                if not isinstance(line, dict) or type(line.get("step")) is not int:
                    raise InputError(
                        f"{self.path}, line {number}, is no line about a step: the file is damaged. Restore it from a copy, or delete it."
                    )
                lines.append(line)
        return lines

    def keep_up_to(self, step: int) -> None:
        """Drops the lines of later steps, which are about to be made again."""
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in self.read() if line["step"] <= step]
            write_atomically(self.path, "".join(kept).encode(), self.mode)


class Ledger:
    """Append-only record of every release, chained by hashes.

    Each line holds the hash of the line before and its own. A line is on disk, synced,
    before the update that it names is applied, so that no fault lowers the count. A hash
    chain alone cannot show that whole last lines were removed. So the last line is kept in a
    second file, ``ledger.head``, authenticated under the run's key and written first: that file
    is at most one line ahead, and then gives the ledger the line that a crash kept from it.
    """

    def __init__(self, path: Path, lines: list[dict[str, Any]], size: int) -> None:
        self.path = path
        self.lines = lines
        self._size = size  # bytes of whole lines on disk
        self._unwritten = b""  # the line that only the head's file has
        self._descriptor: int | None = None
        self._key: bytes | None = None

    @classmethod
    def open(cls, path: Path, *, exclusive: bool = False) -> "Ledger":
        """Reads and checks a ledger; an unfinished last line (a crash while it was written) is left out.

        Args:
            path: May be absent: an empty ledger.
            exclusive: To append, once `appends_under` has the key; no other process may do so at the same time.

        Raises:
            InputError: If a line was altered, lines are missing between others, or another
                process appends to it.
            MachineError: If it cannot be written.
        """
        if exclusive:
            with machine_faults(path):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sync_folder(path.parent)
                ledger = cls.open(path)
            except BlockingIOError:
                os.close(descriptor)
                raise InputError(f"another process is training in {path.parent}. Wait for it to end, or stop it first.") from None
            except BaseException:
                os.close(descriptor)
                raise
            ledger._descriptor = descriptor
            return ledger
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}. Make it readable.") from None
        *whole, _torn = content.split(b"\n")
        lines: list[dict[str, Any]] = []
        head = GENESIS
        for number, raw in enumerate(whole, start=1):
            try:
                line = json.loads(raw)
                intact = line["prev"] == head and line["hash"] == _line_hash(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                intact = False
            if not intact:
                raise InputError(
                    f"{path}, line {number}, does not follow from the lines before it: the ledger was altered or damaged, so what was spent "
                    "is not known. Restore the file from a copy; without one, this run's epsilon cannot be stated."
                )
            head = line["hash"]
            lines.append(line)
        return cls(path, lines, len(content) - len(_torn))

    @property
    def head(self) -> str:
        return self.lines[-1]["hash"] if self.lines else GENESIS

    def head_at(self, count: int) -> str:
        """The head when the ledger had ``count`` lines."""
        return self.lines[count - 1]["hash"] if count else GENESIS

    def appends_under(self, key: bytes) -> None:
        """Takes the run's key, and a line that the head's file has and the ledger has not. Nothing is written yet.

        Raises:
            InputError: If the head's file is missing, not of this key, or not of this ledger.
        """
        self._key = subkey(key, "ledger head")
        path = self.head_path
        restore = "so what was spent is not known. Restore both files from one copy, or start a new run."
        if not path.exists():
            if self.lines:
                raise InputError(f"{path} is missing: lines of {self.path} may be, too, {restore}")
            return
        try:
            content = json.loads(path.read_bytes())
            count, line = content["lines"], content["line"]
            authentic = hmac.compare_digest(content["mac"], self._head_mac(count, line))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            authentic = False
        if not authentic:
            raise InputError(f"{path} was altered or damaged, or it or the file {KEY_FILE} is another run's, {restore}")
        if (count, line["prev"]) == (len(self.lines) + 1, self.head):
            self.lines.append(line)
            self._unwritten = _as_bytes(line)
        elif (count, line["hash"]) != (len(self.lines), self.head):
            lack = f"{self.path} has not the {count} lines that {path.name} states: lines were removed or are another copy's"
            raise InputError(f"{lack}, {restore}")

    def refuse_another_head(self) -> None:
        """Compares with the count and the last line that the head's file states, where there is no key to authenticate it.

        Raises:
            InputError: If they differ, or the file is missing or damaged.
        """
        stated = read_json(self.head_path)
        if not isinstance(stated, dict) or not self.lines or (stated.get("lines"), stated.get("line")) != (len(self.lines), self.lines[-1]):
            raise InputError(
                f"{self.head_path} states another number of lines or another last line than {self.path} has: lines were removed, or one of the "
                "two is another copy's. Restore the folder from a copy."
            )

    def append(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Adds a line and returns it, once it is on disk.

        Raises:
            MachineError: If it cannot be written; the update must then not be applied.
        """
        self.settle()
        line = chained_line(entry, self.head)
        count = len(self.lines) + 1
        write_json(self.head_path, {"lines": count, "line": line, "mac": self._head_mac(count, line)})
        self.lines.append(line)
        self._unwritten = _as_bytes(line)
        self.settle()
        return line

    def settle(self) -> None:
        """Writes the line that only the head's file has, if there is one.

        Raises:
            MachineError: If it cannot be written.
        """
        if not self._unwritten:
            return
        with machine_faults(self.path):
            assert self._descriptor is not None, "opened to read only"
            os.ftruncate(self._descriptor, self._size)  # a part of a line, which a crash left
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            data = self._unwritten
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        self._size += len(self._unwritten)
        self._unwritten = b""

    @property
    def head_path(self) -> Path:
        return self.path.with_name("ledger.head")

    def _head_mac(self, count: int, line: dict[str, Any]) -> str:
        assert self._key is not None, "the key is not known yet"
        return hmac.digest(self._key, canonical([count, line]), "sha256").hex()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def chained_line(entry: dict[str, Any], head: str) -> dict[str, Any]:
    """The line of a ledger that follows ``head``, the hash of the line before it."""
    line = {**entry, "prev": head}
    return {**line, "hash": _line_hash(line)}


def create(path: Path) -> None:
    """Makes the folder of a new run.

    Raises:
        InputError: If something is there already.
        MachineError: If it cannot be made.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is not empty: it may hold another run. Choose another --output, or go on with that run by --resume.")
    with machine_faults(path):
        (path / "checkpoints").mkdir(parents=True)


def refuse_links(folder: Path) -> None:
    """Refuses a folder of a run or a search in which a name leads elsewhere: whoever goes on there would read, append to or overwrite that file.

    Raises:
        InputError: Naming the link, or what else is no ordinary file or folder.
    """
    for root, folders, files in os.walk(folder):
        for path in (Path(root) / name for name in [*folders, *files]):
            if path.is_symlink():
                raise InputError(f"{path} is a symbolic link, and going on here would write where it leads. Put the file itself there.")
            if not (path.is_dir() or path.is_file()):
                raise InputError(f"{path} is no ordinary file. Take it out of the folder.")


def write_data_root(folder: Path, root: str) -> None:
    """Notes where the images lie, for the owner alone."""
    write_atomically(folder / DATA_ROOT_FILE, os.fsencode(os.path.abspath(root)), 0o600)


def read_data_root(folder: Path) -> Path | None:
    """Where the images of a run lie; None where its owner's note is not there."""
    path = folder / DATA_ROOT_FILE
    if path.is_symlink() or not path.is_file():
        return None
    root = os.fsdecode(path.read_bytes())
    return Path(root) if os.path.isabs(root) and "\0" not in root else None


def write_key(folder: Path, key: bytes) -> None:
    """Puts the run's key on disk, readable by its owner alone."""
    write_atomically(folder / KEY_FILE, key.hex().encode() + b"\n", 0o600)


def read_key(folder: Path) -> bytes:
    """The run's key.

    Raises:
        InputError: If it is missing or damaged: the run cannot be continued without it.
    """
    path = folder / KEY_FILE
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError):
        key = b""
    if len(key) != 32:
        raise InputError(f"{path} is missing or damaged: without the run's key its updates cannot be repeated. Start a new run.")
    return key


_KEY = re.compile(rb"[0-9a-f]{64}[\n0]")  # as `write_key` writes it, or as `delete_key` overwrote it before a crash
_ERASED = b"0" * 65


def has_key(folder: Path) -> bool:
    """Whether a run's key is there; one that was overwritten, but whose file a crash left, is not."""
    path = folder / KEY_FILE
    return os.path.lexists(path) and not (path.is_file() and path.read_bytes() == _ERASED)


def delete_key(folder: Path) -> None:
    """Overwrites the key and removes it, so that the noise cannot be regenerated.

    Raises:
        InputError: If what bears its name is no key: that is somebody's file, and is left as it is.
        MachineError: If it cannot be written.
    """
    path = folder / KEY_FILE
    if not os.path.lexists(path):
        return
    no_key = InputError(f"{path} is no key that this tool wrote, so it is not overwritten. Move it away.")
    if path.is_symlink() or not path.is_file():
        raise no_key
    with machine_faults(path):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "r+b") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not _KEY.fullmatch(file.read(len(_ERASED) + 1)):
                raise no_key
            file.seek(0)
            file.write(_ERASED)
            file.flush()
            os.fsync(descriptor)
        path.unlink()
        _sync_folder(folder)


def _as_bytes(line: dict[str, Any]) -> bytes:
    return (json.dumps(line, allow_nan=False) + "\n").encode()


def _line_hash(line: dict[str, Any]) -> str:
    content = {key: value for key, value in line.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
