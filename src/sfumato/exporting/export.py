"""`sfumato export`: the folder that is handed on."""

import hashlib
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from sfumato import config
from sfumato.errors import InputError, refusing
from sfumato.evaluation.trained import load
from sfumato.exporting import cards, onnx_model, timm_folder
from sfumato.exporting.cards import About
from sfumato.json_record import Record
from sfumato.models.libraries import imported
from sfumato.reporting.page import write_report
from sfumato.run_folder import record
from sfumato.run_folder.files import SUMS_FILE, machine_faults, refuse_links, refuse_name
from sfumato.run_folder.ledger import LEDGER_FILE
from sfumato.run_folder.tested import EVALUATION_FILE
from sfumato.run_folder.verification import refuted, verify_run

PREDICT = Path(__file__).with_name("predict.py")
OF_THE_RUN = (
    "recipe.toml",
    record.CERTIFICATE_FILE,
    record.RESULT_FILE,
    record.METRICS_FILE,
    record.WEIGHTS_FILE,
    record.CALIBRATION_FILE,
    EVALUATION_FILE,
    LEDGER_FILE,
)
"""The public files of a run that are handed on: nothing else of its folder can be."""
MADE = (*cards.CARDS, "report.html", timm_folder.CONFIG_FILE, onnx_model.ONNX_FILE, "predict.py", SUMS_FILE)


class Exported(Record):
    """What was handed on.

    Attributes:
        output: The folder.
        files: In it.
        why_not_timm: timm cannot read it; None: it can.
        timm_differs: In what timm's own answers differ, where it can.
    """

    output: str
    files: list[str]
    why_not_timm: str | None
    timm_differs: str | None


def export(run: str | Path, output: str | Path, *, about: About | None = None, trust: Collection[str] = ()) -> Exported:
    """Writes a folder with which anybody can use a finished run's model, and check what it claims.

    Guarantee: it holds public files of the run (`OF_THE_RUN`) and what is made of them alone.

    Args:
        run: The run folder.
        output: A new folder.
        about: What its owner says of the model; None: nothing.
        trust: Modules that may be imported for the model, each by its full name.

    Raises:
        InputError: If the run is unfinished, its files disagree or an audit refuted its claim, the output is there
            already, a package is missing, or the network cannot be written as ONNX.
        MachineError: If it cannot be written. Nothing is left at ``output`` then.
    """
    run, output = Path(run), Path(output)
    refuse_name(output)
    if output.exists() or output.resolve().is_relative_to(run.resolve()):
        raise InputError(f"{output} is there already, or lies in the run's folder. Choose another --output.")
    trained = load(run, trust)
    refuse_links(run)
    certificate, result = verify_run(run)
    for finding in refuted(run, certificate):
        raise InputError(f"{finding}.")
    with machine_faults(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with machine_faults(output), tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as made:
        folder = Path(made) / output.name
        folder.mkdir()
        for name in OF_THE_RUN:
            if (run / name).exists():
                shutil.copyfile(run / name, folder / name)
        # Where run and images lie on their owner's machine is nobody's business.
        recipe = config.shareable(config.parse_resolved(config.read(run / "recipe.toml")))
        (folder / "recipe.toml").write_text(config.to_toml(recipe), encoding="utf-8")
        record.write(folder / record.RESULT_FILE, result.model_copy(update={"run": folder.name}))
        write_report(folder)
        why_not_timm = timm_folder.write(trained, folder)
        onnx_model.write(trained, folder / onnx_model.ONNX_FILE, certificate)
        shutil.copyfile(PREDICT, folder / PREDICT.name)
        differs = timm_folder.differs(trained) if why_not_timm is None else None
        cards.write(folder, trained, about or About(), why_not_timm, differs)
        names = sorted(path.name for path in folder.iterdir())
        lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
        (folder / SUMS_FILE).write_text("".join(lines))
        folder.rename(output)
    return Exported(output=str(output), files=[*names, SUMS_FILE], why_not_timm=why_not_timm, timm_differs=differs)


def sha256_of(path: Path) -> str:
    """Of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def push_to_hub(folder: Path, name: str) -> str:
    """Uploads an export to Hugging Face's hub, as a private model; its owner can publish it there.

    Args:
        folder: The export.
        name: OWNER/MODEL.

    Returns:
        Its address.

    Raises:
        InputError: If huggingface_hub is not installed, or the hub refuses.
    """
    hub = imported("huggingface_hub", "which --push-to-hub needs. Install it: pip install huggingface_hub")
    remedy = f"The export is whole in {folder}. Log in by `hf auth login`, and push again with huggingface_hub."
    with refusing(f"{folder} cannot be pushed to {name}", remedy, Exception):
        hub.create_repo(name, private=True, exist_ok=True)
        return str(hub.upload_folder(repo_id=name, folder_path=folder))
