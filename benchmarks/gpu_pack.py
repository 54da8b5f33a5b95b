"""What travels to a machine with a GPU and no network, and the commands to paste there.

    python -m benchmarks.gpu_pack [--limit-mib 64] [--data ../shared/data] [--run DIR] [--python 3.12]

Fills .gpu/1, .gpu/2 ..., one folder for each command: wheels of what that machine's Python lacks, the commit, CIFAR-10
in pieces. With each travels the tree that git tracks; together they stay within the limit. The first command installs
and measures, the last one trains. `--run`: a folder of run.tar.* that came back from another machine; then nothing is
measured, and the last command goes on with that run.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu_train import DIGEST, Refused, pieces_in

# Of what `sfumato train` imports, what an image with PyTorch, scikit-learn, typer and rich lacks.
NEEDED = (
    "annotated-types",
    "cffi",
    "cryptography",
    "dp-accounting",
    "pydantic",
    "pydantic-core",
    "tomli-w",
    "typing-inspection",
)
# pip matches each exactly: older ones are not implied.
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17)) + (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
BATCHES = (*(f"cifar10-data_batch_{number}.medxz" for number in range(1, 6)), "cifar10-test_batch.medxz")
SMALL_FILES = ("cifar10/cifar10-frames.xz", "cifar10/batches.meta", "unpack.py", "compact_images.py")
ROOM = Path(".gpu")
MIB = 2**20
Group = tuple[str, list[Path]]
"""A folder's name and files that lie there, which travel together."""

INSTALL = (
    "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "
    ".gpu/1/wheels/*.whl && rm -rf /tmp/gpu && cp -r .gpu/1 /tmp/gpu || exit 9"
)
# Only a first command that went well leaves /tmp/gpu.
ADD = (
    "test -d /tmp/gpu || { echo another machine: begin with command 1; exit 9; }; "
    "cp -r .gpu/NUMBER/. /tmp/gpu/ || exit 9"
)
# The NVML check asks for a GPU without touching it, so that processes can still be forked.
ENVIRONMENT = (
    "export PYTHONPATH=/tmp/site:src:. PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE PYTORCH_NVML_BASED_CUDA_CHECK=1 "
    "SFUMATO_COMMIT=$(cat /tmp/gpu/commit)"
)
MEASURE_MINUTES, BEGIN_MINUTES, GO_ON_MINUTES = 8.5, 5.5, 9.5
MEASURE = (
    "nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader; "
    f"python3 -m benchmarks.gpu --minutes {MEASURE_MINUTES} --out $OUT"
)
TRAIN = (
    "python3 -m benchmarks.gpu unpack /tmp/data /tmp/gpu/data && python3 -m benchmarks.gpu train --pieces-mib 15 "
    "--out $OUT --recipe de2022/cifar10-wrn-16-4-eps-1 --run /tmp/runs/eps-1 --data-root /tmp/data"
)
BEGIN = f"--set training.precision=bf16 --minutes {BEGIN_MINUTES}"
GO_ON = f"--from /tmp/gpu/run --minutes {GO_ON_MINUTES}"
MOST_CHARACTERS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=float, default=64, help="of what travels with one command")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--run", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine")
    options = parser.parse_args()
    try:
        pack(int(options.limit_mib * MIB), options.data, options.run, options.python)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    return 0


def pack(limit: int, data: Path, run: Path | None, python: str) -> None:
    """Fills the folders and prints the commands.

    Raises:
        Refused: If files are missing, or something does not fit into the limit.
    """
    groups: list[Group] = [("data", [data / "cifar10" / name]) for name in BATCHES]
    groups.append(("data", [data / name for name in SMALL_FILES]))
    if run is not None:
        if not pieces_in(run):
            raise Refused(f"{run} holds no pieces of a run (run.tar.00 ...)")
        groups += [("run", [piece]) for piece in pieces_in(run)] + [("run", [run / DIGEST])]
    missing = [str(path) for _, paths in groups for path in paths if not path.is_file()]
    if missing:
        raise Refused(f"no {missing[0]}")

    for old in ROOM.glob("[0-9]*"):
        shutil.rmtree(old)
    commit = install_files(ROOM / "1", python)
    tree = size(tracked())
    parts = divide(groups, limit, tree, size((ROOM / "1").rglob("*")))
    print(f"commit {commit}: a tree of {tree / MIB:.1f} MiB travels with each command\n")
    for number, part in enumerate(parts, 1):
        folder = ROOM / str(number)
        for name, paths in part:
            (folder / name).mkdir(parents=True, exist_ok=True)
            for path in paths:
                shutil.copyfile(path, folder / name / path.name)
        command, seconds = command_of(number, last=number == len(parts), goes_on=run is not None)
        assert len(command) < MOST_CHARACTERS
        total = (tree + size(folder.rglob("*"))) / MIB
        holds = ", ".join(sorted(path.name for path in folder.iterdir()))
        carries = f"carries {folder} ({holds}), {total:.1f} of {limit / MIB:g} MiB"
        print(f"command {number} of {len(parts)} {carries}, and takes at most {seconds:.0f} s:\n\n{command}\n")


def install_files(folder: Path, python: str) -> str:
    """Wheels of this environment's versions, and the commit, since there is no git; returns the commit."""
    download = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    download += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    download += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels = [f"{name}=={version(name)}" for name in NEEDED]
    subprocess.run([*download, "-d", str(folder / "wheels"), *wheels], check=True)
    commit = _git("describe", "--always", "--abbrev=7", "--dirty=+").strip()
    (folder / "commit").write_text(commit + "\n", "ascii")
    return commit


def divide(groups: Sequence[Group], limit: int, tree: int, first: int) -> list[list[Group]]:
    """Puts one group of files after another into the present part, or into a new one where it has no room.

    Args:
        groups: In this order.
        limit: Bytes that travel with one command.
        tree: Bytes of it that the tracked tree takes.
        first: Bytes that the first part carries besides.

    Raises:
        Refused: If something fits into no part.
    """
    free = limit - tree - first
    if free < 0:
        raise Refused(f"the tree and what is installed take {(tree + first) / MIB:.1f} of {limit / MIB:g} MiB")
    parts: list[list[Group]] = [[]]
    for name, paths in groups:
        need = size(paths)
        if need > limit - tree:
            raise Refused(
                f"{paths[0]} takes {need / MIB:.1f} MiB, but beside the tree there are {(limit - tree) / MIB:.1f}"
            )
        if need > free:
            parts.append([])
            free = limit - tree
        parts[-1].append((name, paths))
        free -= need
    return parts


def command_of(number: int, *, last: bool, goes_on: bool) -> tuple[str, float]:
    """The command that goes with a part, and the seconds it may take: pip, copies and unpacking are half a minute."""
    jobs, minutes = [], 0.0
    if number == 1 and not goes_on:
        jobs.append(MEASURE)
        minutes += MEASURE_MINUTES
    if last:
        jobs.append(f"{TRAIN} {GO_ON if goes_on else BEGIN}")
        minutes += GO_ON_MINUTES if goes_on else BEGIN_MINUTES
    set_up = INSTALL if number == 1 else ADD.replace("NUMBER", str(number))
    return "; ".join([set_up, *([ENVIRONMENT, *jobs] if jobs else [])]), 30 + 60 * minutes


def tracked() -> Iterator[Path]:
    """What git tracks, or would: new files that it does not ignore travel too."""
    return map(Path, _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").rstrip("\0").split("\0"))


def size(paths: Iterator[Path] | Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
