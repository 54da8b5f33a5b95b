"""An export, a zip of one or a run folder, from anybody: opened so that it can do no harm.

Only files of known names are read, none through a link, and none that is far larger than what it takes on the
disk or in the zip.
"""

import contextlib
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sfumato.errors import InputError, refusing
from sfumato.exporting.export import MADE, OF_THE_RUN
from sfumato.exporting.onnx_model import ONNX_FILE
from sfumato.run_folder.ledger import LEDGER_FILE
from sfumato.run_folder.record import CERTIFICATE_FILE, METRICS_FILE, WEIGHTS_FILE
from sfumato.run_folder.verification import DENSEST

KNOWN = {*OF_THE_RUN, *MADE}
_MOST = 2**22
"""Bytes of a file; of longer ones:"""
_MORE = {LEDGER_FILE: 2**25, METRICS_FILE: 2**25, "report.html": 2**24}
_FOREIGN = "is no file of an export. Take it out, or ask for the export anew."


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Path]:
    """A folder whose files of known names may be read; that of a zip is gone afterwards.

    Raises:
        InputError: Saying what of it may not.
    """
    if path.is_dir():
        yield _checked(path)
    else:
        with tempfile.TemporaryDirectory(prefix="sfumato-") as made:
            with refusing(f"{path} is no zip of an export", "Give its folder.", Exception):
                _unpack(path, Path(made))
            yield _checked(Path(made))


def is_export(folder: Path) -> bool:
    """Whether a folder has what no run's folder has."""
    return any((folder / name).exists() for name in set(MADE) - {"report.html"})


def _checked(folder: Path) -> Path:
    foreign = is_export(folder)
    for file in sorted(folder.iterdir()):
        known, found = file.name in KNOWN, file.lstat()
        if foreign and not known and not _is_carriers(file.name):
            raise InputError(f"{ascii(file.name)} {_FOREIGN}")
        if known and not stat.S_ISREG(found.st_mode):
            raise InputError(f"{file.name} is a link, or no file. Put the file itself there (hf download --local-dir).")
        if known:
            _refuse_size(file.name, found.st_size, found.st_blocks * 512)
    if not (folder / CERTIFICATE_FILE).exists():
        raise InputError(f"there is no {CERTIFICATE_FILE}: this is neither an export nor a run folder. Name one.")
    return folder


def _is_carriers(name: str) -> bool:
    """Whether whatever carried a folder left it: then it is passed over. None of these is a module's name."""
    return name.startswith(".") or name == "__MACOSX"


def _refuse_size(name: str, size: int, taken: int) -> None:
    most = DENSEST * taken + 2**16 if name in (WEIGHTS_FILE, ONNX_FILE) else _MORE.get(name, _MOST)
    if size > most:
        raise InputError(f"{name} has {size} bytes, where {most} are the most that is read. Ask for the export anew.")


def _unpack(path: Path, into: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        paths = {member: member.filename.replace("\\", "/").split("/") for member in archive.infolist()}
        taken = {member: parts for member, parts in paths.items() if parts[-1] and not any(map(_is_carriers, parts))}
        above = {tuple(parts[:-1]) for parts in taken.values()}
        names = [parts[-1] for parts in taken.values()]
        for name in names:
            if name not in KNOWN:
                raise InputError(f"{path} holds {ascii(name)}, which {_FOREIGN}")
        if len(above) != 1 or len(set(names)) < len(names) or any({"", ".", ".."} & set(parts) for parts in above):
            raise InputError(f"{path} holds a file twice, or files outside of one folder. Ask for it anew.")
        if sum(member.compress_size for member in taken) > path.stat().st_size:
            raise InputError(f"{path} says that it packs more than it has. Ask for the export anew.")
        for member, name in zip(taken, names, strict=True):
            _refuse_size(name, member.file_size, member.compress_size)
        for member, name in zip(taken, names, strict=True):
            with archive.open(member) as source, (into / name).open("wb") as target:
                shutil.copyfileobj(source, target)
