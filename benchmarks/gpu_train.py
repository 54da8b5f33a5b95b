"""Training for some minutes on a machine that is lent: what comes back is a run folder in pieces, to go on with later.

    python -m benchmarks.gpu train [--minutes M] [--pieces-mib P] --out DIR --recipe R --run RUN [--data-root D]
        [--from PIECES] [--set KEY=VALUE]... [--device cuda]
    python -m benchmarks.gpu unpack DEST DIR...

`train` begins RUN, or goes on with it where it has begun, by `sfumato train` and `sfumato resume` alone. Before its
minutes are up it stops the run, which then writes a checkpoint. `--from`: a folder of pieces that `--pieces-mib` left
on another machine. Findings are lines of DIR/results.jsonl; what the run says is in DIR/train.log. `unpack` writes
CIFAR-10's official files from the pieces that `gpu_pack` laid out, wherever they lie below the folders.
"""

import argparse
import hashlib
import importlib
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

STOPS_BEFORE, WAITS = 20, 15
"""Seconds: from the signal to the end of the minutes, and how long the present update may take until the run is killed.
What is left is for packing."""
DIGEST = "run.tar.sha256"


class Refused(Exception):
    """One line for the user; nothing was begun."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--minutes", type=float, help="default: until the run is complete")
    training.add_argument("--pieces-mib", type=int, help="packs RUN in pieces of at most so many MiB")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--recipe", required=True, help="of a new run; one that has begun keeps its own")
    training.add_argument("--run", type=Path, required=True)
    training.add_argument("--data-root", type=Path)
    training.add_argument("--from", dest="pieces", type=Path)
    training.add_argument("--set", dest="settings", action="append", default=[], help="of a new run")
    training.add_argument("--device", default="cuda")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("dest", type=Path)
    unpacking.add_argument("folders", type=Path, nargs="+")
    options = vars(parser.parse_args(argv))
    try:
        if options.pop("command") == "train":
            return train(**options)
        unpack(**options)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


def train(
    *,
    run: Path,
    recipe: str,
    out: Path,
    minutes: float | None = None,
    pieces_mib: int | None = None,
    pieces: Path | None = None,
    data_root: Path | None = None,
    settings: Sequence[str] = (),
    device: str = "cuda",
) -> int:
    """Trains for so many minutes; returns 0 if the run is complete or was stopped with a checkpoint.

    Raises:
        Refused: If the pieces are not whole, or RUN is there besides.
    """
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    if pieces is not None:
        join_pieces(pieces, run)
    begun = run.is_dir() and any(run.iterdir())
    command = [sys.executable, "-m", "sfumato"]
    if begun:
        command += ["resume", str(run)]
    else:
        command += ["train", recipe, "--output", str(run), *(word for each in settings for word in ("--set", each))]
    command += ["--device", device]
    command += [] if data_root is None else ["--data-root", str(data_root)]
    note(out, command=command, commit=os.environ.get("SFUMATO_COMMIT"))  # no git where the tree alone was copied to

    log, ended = out / "train.log", "by itself"
    with open(log, "wb") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as child:
        try:
            child.wait(None if minutes is None else 60 * minutes - STOPS_BEFORE - (time.monotonic() - started))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGTERM)
            ended = "stopped"
            try:
                child.wait(WAITS)
            except subprocess.TimeoutExpired:
                child.kill()
                ended = "killed"
    checkpoints = checkpoints_of(run)
    newest = checkpoints[-1].name if checkpoints else None
    last = log.read_text("utf-8", "replace").splitlines()[-3:]
    note(out, exit_code=child.returncode, ended=ended, log=last, checkpoint=newest)
    if pieces_mib is not None and (newest or child.returncode == 0):
        note(out, **pack(run, out, pieces_mib * 2**20))
    return 0 if child.returncode == 0 or (ended == "stopped" and newest) else 1


def note(out: Path, **found: Any) -> None:
    """Adds a finding, on disk at once: the machine may be gone in the next second."""
    line = json.dumps({"part": "train", "at": round(time.time(), 1), **found})
    with open(out / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, flush=True)


def checkpoints_of(run: Path) -> list[Path]:
    """The oldest first; the numbers in their names have leading zeros."""
    return sorted(run.rglob("checkpoints/release-*.pt"), key=lambda path: path.name)


def pieces_in(folder: Path) -> list[Path]:
    """Of a run, in order."""
    return sorted(folder.glob("run.tar.[0-9]*"))


def pack(run: Path, out: Path, piece: int) -> dict[str, Any]:
    """Writes the run folder, of its checkpoints the newest alone, in pieces of at most so many bytes. Its ledger is
    among it: without it no run goes on.
    """
    old = set(checkpoints_of(run)[:-1])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in sorted(run.rglob("*")):
            if path.is_file() and path not in old:
                tar.add(path, path.relative_to(run))
    packed = buffer.getvalue()
    for path in pieces_in(out):
        path.unlink()
    for number, start in enumerate(range(0, len(packed), piece)):
        (out / f"run.tar.{number:02}").write_bytes(packed[start : start + piece])
    digest = hashlib.sha256(packed).hexdigest()
    (out / DIGEST).write_text(digest + "\n", "ascii")
    return {"packed_bytes": len(packed), "pieces": len(pieces_in(out)), "sha256": digest}


def join_pieces(folder: Path, run: Path) -> None:
    """Lays out the run folder that was packed.

    Raises:
        Refused: If there are no pieces, for the run would begin anew; if one is missing or altered; or if RUN has begun
            here, which may be ahead of them.
    """
    found = pieces_in(folder)
    if not found:
        raise Refused(f"{folder} holds no pieces of a run (run.tar.00 ...), and a new one must not take its place")
    if run.exists():
        raise Refused(f"{run} is there already: leave out --from to go on with it, or name another --run")
    packed = b"".join(path.read_bytes() for path in found)
    digest = folder / DIGEST
    if not digest.exists() or hashlib.sha256(packed).hexdigest() != digest.read_text("ascii").strip():
        raise Refused(f"the {len(found)} pieces in {folder} are not those of {DIGEST}: one is missing or altered")
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(run, filter="data")


def unpack(dest: Path, folders: Sequence[Path]) -> None:
    """CIFAR-10 as torchvision reads it, each file on a core of its own.

    Raises:
        Refused: If a piece is missing, or a file differs from its published md5.
    """
    places = {path.name: path for folder in folders for path in folder.rglob("*") if path.is_file()}

    def place(name: str) -> Path:
        if name not in places:
            raise Refused(f"no {name} below {', '.join(map(str, folders))}")
        return places[name]

    code = str(place("unpack.py").parent)
    sys.path.insert(0, code)
    md5 = importlib.import_module("unpack").CIFAR10_MD5
    folder = dest / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    # What stands before and after the pixels of each official file: its pickle's frame.
    raw = lzma.decompress(place("cifar10-frames.xz").read_bytes())
    at = 4 + int.from_bytes(raw[:4], "little")
    jobs = []
    for name, before, after in json.loads(raw[4:at]):
        frame = raw[at : at + before], raw[at + before : at + before + after]
        at += before + after
        jobs.append((place(f"cifar10-{name}.medxz"), frame, md5[name], folder / name))
    _write_checked(folder / "batches.meta", place("batches.meta").read_bytes(), md5["batches.meta"])
    with ProcessPoolExecutor(initializer=sys.path.insert, initargs=(0, code)) as pool:
        for path in pool.map(_unpack_file, *zip(*jobs, strict=True)):
            print(f"unpacked {path}", flush=True)


def _unpack_file(piece: Path, frame: tuple[bytes, bytes], md5: str, path: Path) -> Path:
    images, _ = importlib.import_module("compact_images").load(piece)
    front, back = frame
    _write_checked(path, front + images.transpose(0, 3, 1, 2).tobytes() + back, md5)
    return path


def _write_checked(path: Path, data: bytes, md5: str) -> None:
    if hashlib.md5(data).hexdigest() != md5:
        raise Refused(f"{path.name} does not match its published md5")
    path.write_bytes(data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
