"""`sfumato verify`: whether what was handed on agrees with itself, for whoever receives it."""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import torch

from sfumato import __version__, config
from sfumato.accounting import formats
from sfumato.errors import InputError
from sfumato.evaluation.trained import load
from sfumato.exporting import onnx_model, timm_folder
from sfumato.exporting.export import PREDICT, sha256_of
from sfumato.exporting.received import KNOWN, is_export, opened
from sfumato.json_record import Record
from sfumato.models import registry
from sfumato.run_folder.files import SUMS_FILE, refuse_loop
from sfumato.run_folder.record import Certificate
from sfumato.run_folder.verification import compare_run, refuted

NOT_PROVED = [
    "that the training happened as its files say: whoever writes all of them anew is not found",
    "that its images were as many, and of as many people, as stated",
    "accuracies, calibration and audit: they were measured on images that are not here",
    "who issued it, when, and by which version",
    "answers for images other than the made-up ones on which model.onnx and the weights were compared: a network can be"
    " made to answer otherwise at a sign in the picture",
    "README.md, PRIVACY.md and report.html: they are prose about privacy.json, which was checked",
]

_MEMORY, _COPIES, _PER_PIXEL = 256 * 2**20, 12, 1024
"""Bytes that a check may take, and for each byte of the files, and for each pixel of an image."""
_SECONDS = 60
_TOO_MUCH = 3


class Verified(Record):
    """What was found, a line each.

    Attributes:
        valid: Nothing was.
        findings: What does not agree.
        checked: What was compared.
        not_checked: What could not be, and why.
        not_proved: What no file can prove.
    """

    valid: bool
    findings: list[str]
    checked: list[str]
    not_checked: list[str]
    not_proved: list[str]


def verify(path: str | Path, *, trust: Collection[str] = ()) -> Verified:
    """Compares the files of an export, of a zip of one or of a run folder, and computes epsilon anew. No image and no
    key is needed; nothing is written but, of a zip, a temporary folder.

    Guarantee: the files may come from anybody. No code of theirs runs, no link is followed, no path of theirs is used,
    and a process of its own looks at them, which ends when it takes more memory or time than files of their size need.

    Args:
        path: The folder or zip.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: If it is neither, or a file of it may not be read.
    """
    if not Path(path).exists():
        raise InputError(f"there is no {path}. Name an export, a zip of one, or a run folder.")
    command = [sys.executable, "-P", "-m", __name__, str(path), *trust]
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode in (_TOO_MUCH, -signal.SIGABRT, -signal.SIGXCPU, -signal.SIGKILL, -signal.SIGSEGV):
        raise InputError(f"{path} takes more memory or time than files of its size need. Ask for the export anew.")
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    told = json.loads(done.stdout)
    if "refused" in told:
        raise InputError(told["refused"])
    return Verified(**told)


def check(path: Path, trust: Collection[str] = ()) -> Verified:
    """What `verify` does, in this process."""
    checked, findings, not_checked = list[str](), list[str](), list[str]()
    with opened(path) as folder:
        refuse_loop(folder)
        if (folder / SUMS_FILE).exists():
            findings += _digests(folder)
            checked.append(f"digests of all files ({SUMS_FILE})")
        elif is_export(folder):
            findings.append(f"{SUMS_FILE} is not there: every export has it")
        else:
            not_checked.append(f"digests of files: there is no {SUMS_FILE}, as in a run folder")
        try:
            certificate, _, wrong = compare_run(folder)
            findings += wrong + refuted(folder, certificate)
            checked.append(f"certificate, result, ledger, recipe and weights against each other; {_told(certificate)}")
            findings += _model(folder, certificate, trust, checked, not_checked)
        except InputError as error:
            findings.append(str(error))
        findings = [line.replace(f"{folder}/", "") for line in findings]
    return Verified(
        valid=not findings, findings=findings, checked=checked, not_checked=not_checked, not_proved=NOT_PROVED
    )


def _told(certificate: Certificate) -> str:
    if not certificate.holds:
        return "no guarantee is claimed"
    epsilon, delta = formats.epsilon_text(certificate.epsilon), formats.delta_text(certificate.delta)
    return f"epsilon, stated as {epsilon} at delta {delta}, computed anew"


def _digests(folder: Path) -> list[str]:
    lines = (folder / SUMS_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    stated = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.name for path in folder.iterdir() if path.name in KNOWN} - {SUMS_FILE}
    found = [f"{name} is not listed in {SUMS_FILE}" for name in sorted(there - stated.keys())]
    found += [f"{ascii(name)} is listed in {SUMS_FILE} and is not there" for name in sorted(stated.keys() - there)]
    changed = [name for name in sorted(there & stated.keys()) if sha256_of(folder / name) != stated[name]]
    return found + [f"{name} was changed after the export: its digest is another" for name in changed]


def _model(
    folder: Path, certificate: Certificate, trust: Collection[str], checked: list[str], not_checked: list[str]
) -> list[str]:
    """In what the files of the model disagree with its weights."""
    path, recipe = folder / onnx_model.ONNX_FILE, config.parse_resolved(config.read(folder / "recipe.toml"))
    module = registry.imported_module(recipe.model.name)
    if module is not None and module not in trust:
        not_checked.append(f"answers of the model: that would import {module}. If you trust it, add --trust {module}")
        return []
    trained = load(folder, trust)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:  # what a network computes grows with its images
        resource.setrlimit(resource.RLIMIT_DATA, (soft + _PER_PIXEL * trained.shape[1] ** 2, hard))
    findings = timm_folder.findings(trained, folder)
    missing = [package for package in ("onnx", "onnxruntime") if importlib.util.find_spec(package) is None]
    if not path.exists():
        not_checked.append(f"{path.name}: it is not there")
    elif missing:
        not_checked.append(f"{path.name}: {missing[0]} is not installed (pip install onnx onnxruntime)")
    else:
        findings += onnx_model.findings(trained, path, certificate)
        checked.append(f"answers of {path.name} against the weights', on made-up images")
    if (folder / "predict.py").exists() and sha256_of(folder / "predict.py") != sha256_of(PREDICT):
        findings.append(f"predict.py is not that of Sfumato {__version__}: read it before you run it")
    return findings


def _bound(size: int) -> None:
    """Bounds what this process may take besides what is imported, by the bytes of what it looks at."""
    for module in ("onnx.shape_inference", "onnxruntime", "scipy.stats", "dp_accounting"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    torch.set_num_threads(1)
    status = Path("/proc/self/status")
    if status.exists():
        taken = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData"))
        most = 1024 * taken + _MEMORY + _COPIES * size
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    seconds = int(time.process_time()) + _SECONDS + size // 2**20
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


def _main() -> None:
    path, trust = Path(sys.argv[1]), sys.argv[2:]
    files = [path] if path.is_file() else path.iterdir()
    _bound(sum(min(found.st_size, 512 * found.st_blocks) for found in map(os.lstat, files)))
    try:
        told = check(path, trust).as_json()
    except InputError as error:
        told = {"refused": str(error)}
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        sys.exit(_TOO_MUCH)
    print(json.dumps(told))


if __name__ == "__main__":
    _main()
