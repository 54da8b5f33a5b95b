"""The members of a tar archive, one after another, as far as it is whole.

A tar ends with two blocks of zeros, and zeros that fill its last record. What stands behind them no tool would show:
another archive, or images whose headers were overwritten. So it is looked at, down to the file's end.
"""

import contextlib
import enum
import lzma
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from sfumato.errors import InputError

DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, ValueError)
"""What damaged archives raise when they are read, beside `tarfile.TarError`."""
MOST_BYTES = 2**28
"""Of one member: no image file is larger."""
_MOST_ZEROS = 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE
_AT_ONCE = 2**20


class Member(NamedTuple):
    """A file of a tar; one that the archive's end cut is not whole."""

    name: str
    content: bytes
    is_whole: bool


class End(enum.Enum):
    """What stands behind the last member."""

    WHOLE = "zeros that fill a record"
    CUT = "no block of zeros, or more zeros than a tar ends with: members were lost"
    MORE = "a block of zeros, and then something else"


def members(path: Path, report: Callable[[str], None]) -> Iterator[Member | None]:
    """A tar's files, as far as it goes; then None if it is cut short.

    Raises:
        InputError: If it is no tar, holds what is no file, or goes on behind its end.
    """
    cut = f"warning: {path} is cut short or damaged: what lay behind that place is lost"
    try:
        tar = tarfile.open(path, "r:*")
    except (tarfile.TarError, *DAMAGED) as error:
        raise InputError(f"{path} is no tar archive: {first_line(error)}. Put the original there.") from None
    with tar:
        while True:
            try:
                member = next_member(tar)
                if member is None:
                    match end_of(tar):
                        case End.MORE:
                            raise InputError(
                                f"{path} goes on behind its end: archives were put together by cat, or it is damaged. "
                                "Keep them apart, or put the original there."
                            )
                        case End.CUT:
                            report(cut)
                            yield None
                    return
                if member.isdir():
                    continue
                if not member.isfile():
                    raise InputError(f"{path}: {member.name} is a link or no ordinary file. Put the file itself there.")
                if member.size > MOST_BYTES:
                    raise InputError(f"{path}: {member.name} has {member.size} bytes. No image is as large.")
                file = tar.extractfile(member)
            except (tarfile.TarError, *DAMAGED) as error:
                if isinstance(error, InputError):
                    raise
                report(cut)
                yield None
                return
            content = b""
            with contextlib.suppress(tarfile.TarError, *DAMAGED):
                content = b"" if file is None else file.read()
            is_whole = len(content) == member.size
            yield Member(plain_name(member), content, is_whole)
            if not is_whole:
                report(cut)
                yield None
                return


def plain_name(member: tarfile.TarInfo) -> str:
    """A member's path in one spelling: Unicode NFC, no "./"."""
    return unicodedata.normalize("NFC", PurePosixPath(member.name).as_posix())


def next_member(tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member; None at the end.

    Raises:
        tarfile.ReadError: If it leads back: some versions of Python would go round for ever.
    """
    before, member = tar.offset, tar.next()
    vars(tar)["members"] = []  # the headers of a large shard would all stay in memory
    if member is not None and (member.size < 0 or tar.offset < before):
        raise tarfile.ReadError("a member of negative size")
    return member


def end_of(tar: tarfile.TarFile) -> End:
    """What stands behind the last member of a tar that was read to its end."""
    assert tar.fileobj is not None
    zeros = tarfile.BLOCKSIZE
    try:
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            return End.CUT
        while part := tar.fileobj.read(_AT_ONCE):
            if part.count(0) < len(part):
                return End.MORE
            zeros += len(part)
    except (tarfile.TarError, *DAMAGED):  # of a compressed one that is cut
        return End.CUT
    return End.WHOLE if zeros <= _MOST_ZEROS else End.CUT


def first_line(error: Exception) -> str:
    """What an error says, for a line of one's own."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
