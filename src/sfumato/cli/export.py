"""`sfumato export` and `sfumato verify`: what is handed on, and what the receiver can check."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfumato.cli import options, output

if TYPE_CHECKING:
    from sfumato.exporting.export import Exported
    from sfumato.exporting.verify import Verified


def export(
    run: Path,
    *,
    output_: Annotated[Path, typer.Option("--output", "-o")],
    intended_use: str | None = None,
    data: str | None = None,
    license_: str | None = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/MODEL")] = None,
    trust: options.Trust = None,
    json_: bool = False,
) -> None:
    """Writes a folder with which anybody can use a finished run's model and check what it claims: weights, ONNX, a
    program that needs nothing of ours, model card, privacy card. Public files alone enter it.

    Args:
        output_: A new folder.
        intended_use: What the model is for, by whom; for the model card.
        data: Where the images come from, and who is on them; for both cards.
        license_: Of the model, as an SPDX identifier in small letters.
        push_to_hub: Uploads it to Hugging Face's hub, as a private model.

    Example:
        sfumato export runs/xrays --output xrays-model
    """
    from sfumato.exporting.cards import About
    from sfumato.exporting.export import export as hand_on
    from sfumato.exporting.export import push_to_hub as push

    about = About(intended_use, data, license_)
    found = hand_on(run, output_, about=about, trust=trust or ())
    if uncovered := [name for name in ("calibration.json", "evaluation.json") if name in found.files]:
        output.note(f"{' and '.join(uncovered)} went with it: no epsilon covers the images that they are of")
    if push_to_hub is not None:
        output.note(f"pushed to {push(output_, push_to_hub)}, as a private model")
    output.answer(found, json_, _show_export)


def _show_export(found: "Exported") -> None:
    output.say(f"{found.output}: {', '.join(found.files)}")
    if found.why_not_timm is not None:
        output.say(f"no config.json: {found.why_not_timm}; model.onnx holds the whole network")
    if found.timm_differs is not None:
        output.say(f"config.json: {found.timm_differs}; model.onnx and predict.py decide as here")
    output.say(f"use it    python {found.output}/predict.py PICTURE...   (pip install onnxruntime pillow numpy)")
    output.say(f"check it  sfumato verify {found.output}")


def verify(path: Path, *, trust: options.Trust = None, json_: bool = False) -> None:
    """Checks what was received: computes epsilon anew, compares certificate, ledger, weights and model.onnx. Status 1
    where they disagree.

    Args:
        path: An export, a zip of one, or a run folder.

    Example:
        sfumato verify xrays-model
    """
    from sfumato.exporting.verify import verify as check

    found = check(path, trust=trust or ())
    output.answer(found, json_, _show_verified)
    if not found.valid:
        raise typer.Exit(1)


def _show_verified(found: "Verified") -> None:
    for told, lines in (("checked", found.checked), ("not checked", found.not_checked), ("WRONG", found.findings)):
        for line in lines:
            output.say(f"{told:<12}{line}")
    for line in found.not_proved:
        output.say(f"{'not proved':<12}{line}")
    output.say("its files agree with each other" if found.valid else "its files do NOT agree: do not rely on it")
