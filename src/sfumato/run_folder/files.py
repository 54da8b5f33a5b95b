"""Writing files so that no fault loses or alters them. What a run leaves is listed in the package."""

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sfumato.config import DataConfig, Recipe
from sfumato.errors import InputError, MachineError, refusing

OWNER = "owner"
"""The folder in a run's that is for its owner alone, and never handed on."""
SUMS_FILE = "SHA256SUMS"
"""Of an export: digests of all its other files."""
DATA_ROOT_FILE = f"{OWNER}/data_root"
INIT_FILE = f"{OWNER}/init_from"
BUDGET_FILE = f"{OWNER}/budget"
_PAUSE = 0.05


def require_folder(folder: Path) -> None:
    """Raises InputError where there is none."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}. Name that of a run.")


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


def write_with_metadata(path: Path, content: bytes, metadata: dict[str, str]) -> None:
    """Writes a safetensors file with this metadata alone, as `write_atomically`: equal ones give the same bytes."""
    # The library writes metadata in an order that changes. A file is the length of its header in eight bytes, the
    # header as JSON, and the tensors, which begin at a multiple of eight.
    end = 8 + int.from_bytes(content[:8], "little")
    header = {**json.loads(content[8:end]), "__metadata__": metadata}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(path, len(text).to_bytes(8, "little") + text + content[end:])


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Writes strict JSON (no NaN, no Infinity), as `write_atomically`."""
    write_atomically(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), mode)


def read_json(path: Path) -> Any:
    """Reads a JSON file of a run.

    Raises:
        InputError: If it is missing or damaged.
    """
    kinds = OSError, ValueError, RecursionError  # lists within lists
    with refusing(f"{path} is missing or damaged", "Restore it from a copy.", *kinds):
        return json.loads(path.read_text(encoding="utf-8"))


def refuse_loop(folder: Path) -> None:
    """Refuses the folder of a `PrivateLoop` where a run's is asked for.

    Raises:
        InputError: If it has a ledger, and nothing else that a run leaves.
    """
    others = ("recipe.toml", "model.safetensors", "result.json", "SHA256SUMS")
    if (folder / "ledger.jsonl").exists() and not any((folder / name).exists() for name in others):
        what = "is of a loop of your own (sfumato.PrivateLoop): it has a certificate, and neither recipe nor model"
        raise InputError(f"{folder} {what}. Save the model by torch.save, and read privacy.json as it is.")


def lock(descriptor: int, path: Path, patience: float = 0.0) -> bool:
    """Whether nobody else has a file's lock, or gives it back within so many seconds, and it was taken: it lasts while
    the descriptor is open, and dies with the process.

    Raises:
        MachineError: If the file system has no locks.
    """
    until = time.monotonic() + patience
    with machine_faults(path):
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE)


def refuse_filled(path: Path) -> None:
    """Refuses a place for a new run where something is already.

    Raises:
        InputError: If it is a file, or a folder with something in it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} is not empty. Choose another --output, or go on with the run there by --resume.")


def make_folders(path: Path) -> None:
    """A run's folder, and the one for its owner."""
    with machine_faults(path):
        (path / OWNER).mkdir(parents=True, exist_ok=True)
        os.chmod(path / OWNER, 0o700)
        (path / OWNER / "checkpoints").mkdir(exist_ok=True)
        for folder in (path / OWNER, path, path.parent):
            sync_folder(folder)


def refuse_drawing(path: Path, option: str, endings: Sequence[str]) -> None:
    """Refuses a file that could not be written, before anything is computed for it.

    Raises:
        InputError: If its ending is not one of these, or it has no folder.
    """
    if path.suffix.lower() not in endings:
        what = f"{option} writes {', '.join(endings)}, not {path.name!r}"
        raise InputError(f"{what}. Give a name that ends in {endings[0]}.")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{option} {path} is a folder, or there is no folder {path.parent}. Make it, or name another.")


def refuse_name(folder: Path) -> None:
    """Refuses a run folder whose path is not UTF-8: its files name it, and could not be read again.

    Raises:
        InputError: If it is not.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in str(folder)):
        raise InputError(f"the name of {ascii(str(folder))} is not UTF-8, but its files state it. Choose another.")


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
        raise InputError(f"{folder} lies in the folder of images {images}. Choose an --output elsewhere.")


def refuse_links(folder: Path) -> None:
    """Refuses the folder of a run or a search in which a name leads elsewhere: whoever goes on there would append to or
    overwrite that file. The folder may be a stranger's.

    Raises:
        InputError: Naming the link.
    """
    link = next((path for path in folder.glob("**/*") if path.is_symlink()), None)
    if link is not None:
        raise InputError(f"{link} is a symbolic link, through which this would write. Put the file itself there.")


def write_places(folder: Path, recipe: Recipe, budget: Path | None = None) -> None:
    """Notes for the owner where images, weights and the budget lie (`DATA_ROOT_FILE`, `INIT_FILE`, `BUDGET_FILE`)."""
    source = recipe.model.init_from
    weights = source if source is not None and Path(source).exists() else None
    for name, place in ((BUDGET_FILE, budget), (DATA_ROOT_FILE, recipe.data.path), (INIT_FILE, weights)):
        if place is not None:
            write_atomically(folder / name, os.fsencode(os.path.abspath(place)), 0o600)


def read_place(folder: Path, name: str) -> Path | None:
    """Where a run's images lie (`DATA_ROOT_FILE`), its first weights (`INIT_FILE`) or its budget (`BUDGET_FILE`), as
    `write_places` noted; None where the note is not there.
    """
    path = folder / name
    if path.is_symlink() or not path.is_file():
        return None
    place = Path(os.fsdecode(path.read_bytes()))
    return place if place.is_absolute() else None


def sync_folder(folder: Path) -> None:
    """Makes names in a folder last through a crash."""
    with contextlib.ExitStack() as afterwards:
        descriptor = os.open(folder, os.O_RDONLY)
        afterwards.callback(os.close, descriptor)
        os.fsync(descriptor)
