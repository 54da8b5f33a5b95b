"""Writing files so that no fault loses or alters them. What a run leaves is listed in the package."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sfumato.config import DataConfig, Recipe
from sfumato.errors import InputError, MachineError

OWNER = "owner"
"""The folder in a run's that is for its owner alone, and never handed on."""
DATA_ROOT_FILE = f"{OWNER}/data_root"
INIT_FILE = f"{OWNER}/init_from"


@contextlib.contextmanager
def machine_faults(path: Path) -> Iterator[None]:
    """Turns a failing disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{path} cannot be written: {error.strerror}. What was written before is intact; make room or make it "
            "writable, then go on: a run by `sfumato resume`, all else by the same command."
        ) from error


def write_atomically(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Writes a whole file or leaves the old one: a new file, synced, then renamed over it.

    Args:
        path: The file.
        data: All of it.
        mode: Of the file.

    Raises:
        MachineError: If the disk is full, read-only or failing.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with machine_faults(path), contextlib.ExitStack() as afterwards:
        afterwards.callback(part.unlink, missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(part, path)
        sync_folder(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Writes strict JSON (no NaN, no Infinity), as `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), mode)


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run.

    Raises:
        InputError: If it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # lists within lists
        raise InputError(
            f"{path} is missing or damaged ({type(error).__name__}). Give the folder of a run that this tool wrote."
        ) from None


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
                        f"{self.path}, line {number}, is no line about a step: the file is "
                        "damaged. Restore it from a copy, or delete it."
                    )
                lines.append(line)
        return lines

    def keep_up_to(self, step: int) -> None:
        """Drops the lines of later steps, which are about to be made again."""
        if self.path.exists():
            kept = [json.dumps(line) + "\n" for line in self.read() if line["step"] <= step]
            write_atomically(self.path, "".join(kept).encode(), self.mode)


def create(path: Path) -> None:
    """Makes the folder of a new run.

    Raises:
        InputError: If something is there already.
        MachineError: If it cannot be made.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"{path} is not empty: it may hold another run. Choose another --output, or go on "
            "with that run by --resume."
        )
    make_folders(path)


def make_folders(path: Path) -> None:
    """A run's folder, and the one for its owner."""
    with machine_faults(path):
        (path / OWNER).mkdir(parents=True, exist_ok=True)
        os.chmod(path / OWNER, 0o700)
        (path / OWNER / "checkpoints").mkdir(exist_ok=True)
        for folder in (path / OWNER, path, path.parent):
            sync_folder(folder)


def refuse_name(folder: Path) -> None:
    """Refuses a run folder whose path is not UTF-8: its files name it, and could not be read again. And one whose
    name no file system takes.

    Raises:
        InputError: If it is not, or too long.
    """
    if any(len(os.fsencode(part)) > 255 for part in folder.parts):
        raise InputError(f"a name in {str(folder)[:60]}... has more than 255 bytes. Choose a shorter --output.")
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"the name of {ascii(str(folder))} is not UTF-8, but the run's own files state it. Choose another --output."
        ) from None


def refuse_among_images(folder: Path, data: DataConfig, root: Path | None = None) -> None:
    """Refuses to write a run into the folder of images that it trains on: its files would be taken
    for images from then on.

    Args:
        folder: Of the run, of a search, or a file of theirs.
        data: Says where a folder of images lies.
        root: Where it lies; None: as `data` says.

    Raises:
        InputError: If it lies there.
    """
    images = data.path if root is None else root
    if data.name == "folder" and images is not None and folder.resolve().is_relative_to(Path(images).resolve()):
        raise InputError(
            f"{folder} lies in the folder of images {images}: its files would be taken for "
            "images. Choose an --output elsewhere."
        )


def refuse_links(folder: Path, *, below: bool = True) -> None:
    """Refuses the folder of a run or a search in which a name leads elsewhere: whoever goes on there would append to or
    overwrite that file. The folder may be a stranger's.

    Args:
        folder: Of a run or a search.
        below: Whether what lies in folders of it counts, too.

    Raises:
        InputError: Naming the link.
    """
    link = next((path for path in folder.glob("**/*" if below else "*") if path.is_symlink()), None)
    if link is not None:
        raise InputError(
            f"{link} is a symbolic link, and going on here would write where it leads. Put the file itself there."
        )


def write_places(folder: Path, recipe: Recipe) -> None:
    """Notes for the owner where images and weights lie (`DATA_ROOT_FILE`, `INIT_FILE`)."""
    source = recipe.model.init_from
    places = {
        DATA_ROOT_FILE: recipe.data.path,
        INIT_FILE: source if source is not None and Path(source).exists() else None,
    }
    for name, place in places.items():
        if place is not None:
            write_atomically(folder / name, os.fsencode(os.path.abspath(place)), 0o600)


def read_data_root(folder: Path) -> Path | None:
    """Where the images of a run lie; None where its owner's note is not there."""
    return read_place(folder, DATA_ROOT_FILE)


def read_place(folder: Path, name: str) -> Path | None:
    """What `write_places` noted; None where the note is not there."""
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return None
    root = os.fsdecode(path.read_bytes())
    return Path(root) if os.path.isabs(root) and "\0" not in root else None


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last through a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
