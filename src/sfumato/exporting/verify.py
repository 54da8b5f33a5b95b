"""`sfumato verify`: whether what was handed on agrees with itself, for whoever receives it."""

import importlib.util
from collections.abc import Collection
from pathlib import Path

from sfumato import config
from sfumato.accounting import formats
from sfumato.errors import InputError
from sfumato.evaluation.trained import load
from sfumato.exporting import onnx_model, timm_folder
from sfumato.exporting.export import PREDICT, sha256_of
from sfumato.exporting.received import opened
from sfumato.json_record import Record
from sfumato.models import registry
from sfumato.run_folder.files import SUMS_FILE
from sfumato.run_folder.record import Certificate
from sfumato.run_folder.verification import compare_run

NOT_PROVED = [
    "that the training happened as its files say: whoever writes all of them anew is not found",
    "that its images were as many, and of as many people, as stated",
    "accuracies: they were measured on images that are not here",
    "answers for images other than the made-up ones on which model.onnx and the weights were compared",
    "README.md, PRIVACY.md and report.html: they are prose about privacy.json, which was checked",
]


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

    Guarantee: the files may come from anybody. No code of theirs runs, no link is followed, no path of theirs is used.

    Args:
        path: The folder or zip.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: If it is neither, or a file of it may not be read.
    """
    if not Path(path).exists():
        raise InputError(f"there is no {path}. Name an export, a zip of one, or a run folder.")
    checked, findings, not_checked = list[str](), list[str](), list[str]()
    with opened(Path(path)) as folder:
        if (folder / SUMS_FILE).exists():
            findings += _digests(folder)
            checked.append(f"digests of all files ({SUMS_FILE})")
        else:
            not_checked.append(f"digests of files: there is no {SUMS_FILE}, as in a run folder")
        try:
            certificate, _, wrong = compare_run(folder)
            findings += wrong
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
    there = {path.name for path in folder.iterdir()} - {SUMS_FILE}
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
        findings.append("predict.py is not that of this version of Sfumato: read it before you run it")
    return findings
