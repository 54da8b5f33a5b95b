"""An export, a zip of one or a run folder, from anybody: opened so that it can do no harm.

Only files of known names are read, none through a link, and none that is far larger than what it takes on the
disk or in the zip.
"""

import contextlib
import os
import shutil
import stat
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sfumato.errors import InputError, refusing
from sfumato.exporting.export import MADE, OF_THE_RUN
from sfumato.exporting.onnx_model import ONNX_FILE
from sfumato.run_folder.files import SUMS_FILE
from sfumato.run_folder.ledger import LEDGER_FILE
from sfumato.run_folder.record import METRICS_FILE, WEIGHTS_FILE
from sfumato.run_folder.verification import DENSEST

KNOWN = {*OF_THE_RUN, *MADE}
_MOST = 2**22
"""Bytes of a file; of longer ones:"""
_MORE = {LEDGER_FILE: 2**25, METRICS_FILE: 2**25, "report.html": 2**24}
_MODELS = (WEIGHTS_FILE, ONNX_FILE)
_END = struct.Struct("<4s8xLLH")
"""Of a zip: signature, and, after counts, the bytes of its directory, where that begins, and of a comment."""
_MOST_OF_DIRECTORY = 2**16


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
            with refusing(f"{path} is no zip of an export", "Give its folder.", zipfile.BadZipFile, OSError, EOFError):
                _unpack(path, Path(made))
            yield Path(made)


def _checked(folder: Path) -> Path:
    is_export = (folder / SUMS_FILE).exists()
    for file in sorted(folder.iterdir()):
        known, found = file.name in KNOWN, file.lstat()
        if is_export and not known:
            raise InputError(f"{file} is no file of an export. Take it out, or ask for the export anew.")
        if known and not stat.S_ISREG(found.st_mode):
            raise InputError(f"{file} is a link, or no file. Put the file itself there.")
        if known:
            _refuse_size(file.name, found.st_size, found.st_blocks * 512)
    return folder


def _refuse_size(name: str, size: int, taken: int) -> None:
    most = DENSEST * taken + 2**16 if name in _MODELS else _MORE.get(name, _MOST)
    if size > most:
        raise InputError(f"{name} has {size} bytes, where {most} are the most that is read. Ask for the export anew.")


def _unpack(path: Path, into: Path) -> None:
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - _END.size)
        file.seek(start)
        signature, size, _, comment = _END.unpack(file.read().rjust(_END.size))
        # A directory of millions of names would take all memory before one is looked at.
        if signature != b"PK\5\6" or comment or size > _MOST_OF_DIRECTORY:
            raise InputError(f"{path} is no zip of an export: it ends otherwise. Give its folder.")
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        for member in members:
            *above, name = member.filename.split("/")
            if (
                name not in KNOWN
                or above not in ([], members[0].filename.split("/")[:-1])
                or set(above) & {"", ".", ".."}
            ):
                raise InputError(f"{path} holds {ascii(member.filename)}, which is no file of an export. Take it out.")
            _refuse_size(name, member.file_size, member.compress_size)
        if len({member.filename for member in members}) < len(members):
            raise InputError(f"{path} holds a file twice. Ask for the export anew.")
        for member in members:
            with archive.open(member) as source, (into / member.filename.split("/")[-1]).open("wb") as target:
                shutil.copyfileobj(source, target)
