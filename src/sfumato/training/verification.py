"""Whether a finished run's files claim what its ledger and its recipe give, before anything of them is believed or told again."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pydantic
import torch

from sfumato import config
from sfumato.data.dataset import Dataset
from sfumato.errors import InputError
from sfumato.planning.resolve import Plan
from sfumato.run_folder import key_file
from sfumato.run_folder import session as sessions
from sfumato.run_folder.checkpoint import Checkpoint
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.files import JsonLines, read_json
from sfumato.run_folder.ledger import Ledger
from sfumato.training.certificate import certificate, in_result, in_weights


class _Result(pydantic.BaseModel):
    """What of result.json is measured and printed: no claim, but of these types."""

    run: str
    held_out: str
    test_accuracy: pydantic.FiniteFloat
    test_accuracy_last: pydantic.FiniteFloat
    test_accuracy_top5: pydantic.FiniteFloat | None
    balanced_accuracy: pydantic.FiniteFloat
    majority_rate: pydantic.FiniteFloat
    auroc: pydantic.FiniteFloat | None
    per_class: list[pydantic.FiniteFloat | None]
    test_views: int = 0
    test_accuracy_augtest_vote: pydantic.FiniteFloat | None = None
    test_accuracy_augtest_mean: pydantic.FiniteFloat | None = None


class _Measured(pydantic.BaseModel):
    """One line of metrics.jsonl."""

    step: int
    epsilon: pydantic.FiniteFloat | None
    accuracy: pydantic.FiniteFloat
    accuracy_last: pydantic.FiniteFloat


def verify_finished(folder: Path, plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """Believes a run folder that says it is complete only if everything in it agrees. Nothing is written.

    While the key is there, ledger and newest checkpoint are authenticated under it, as a resume does, and the weights must be the
    checkpoint's. Without a key ledger.head's count and last line are compared with the ledger.

    Returns:
        The result, as the run printed it.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    if not key_file.has_key(folder):
        ledger = Ledger.open(folder / "ledger.jsonl")
        ledger.refuse_another_head()
        return verify(folder, plan, dataset, ledger)
    ledger, checkpoint = sessions.authenticated(folder, plan, dataset)
    result = verify(folder, plan, dataset, ledger)
    _compare_weights(folder / "model.safetensors", checkpoint)
    return result


def verify(folder: Path, plan: Plan, dataset: Dataset, ledger: Ledger) -> dict[str, Any]:
    """Compares certificate, result and weights with what is computed anew from the plan and the ledger.

    Without a key this finds mistakes, mixed files and altered claims; whoever writes all files anew, ledger included, is not found.

    Returns:
        The result.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    spent = spent_mechanism(ledger.lines)
    sessions.refuse_another_recipe(ledger, plan)
    sessions.refuse_incomplete(folder, plan, ledger)
    truth = _as_json(certificate(plan, spent, ledger, "complete", dataset))
    stated, result = read_json(folder / "privacy.json"), read_json(folder / "result.json")
    kept = certificate(_keeping_key(plan, not plan.recipe.run.keep_key), spent, ledger, "complete", dataset)["not_covered"]
    if isinstance(stated, dict) and stated.get("not_covered") == kept:  # `run.keep_key` may be another than when the run ended
        truth["not_covered"] = kept
    _compare(folder / "privacy.json", stated, truth, of_all=("",))
    claims = in_result(truth)
    _compare(folder / "result.json", result, claims, of_all=("private", "epsilon", "why", "max_images"))
    facts, recipe = _metadata(folder / "model.safetensors")
    _compare(folder / "model.safetensors", facts, in_weights(truth))
    _compare(folder / "model.safetensors", config.releasing_keys(recipe), config.releasing_keys(plan.recipe))
    _refuse_other_types(folder, result, len(claims["classes"]))
    return result


def _compare(path: Path, found: Any, expected: dict[str, Any], of_all: Any = ()) -> None:
    """Every key of ``expected`` must be there alike, and no other key that begins with one of ``of_all``."""
    stated = found if isinstance(found, dict) else {}
    added = (key for key in stated if key not in expected and key.startswith(tuple(of_all)))
    wrong = next((key for key, value in expected.items() if key not in stated or not _alike(stated[key], value)), None) or next(added, None)
    if wrong is not None:
        raise InputError(
            f"{path} states another {wrong} than this run's ledger and recipe give: it was altered, or is another run's. "
            "Restore the folder from a copy."
        )


def _alike(stated: Any, expected: Any) -> bool:
    """Equal, but for the last digits of a number, which another machine may compute otherwise."""
    if type(expected) is float and type(stated) in (int, float):
        return stated == expected or math.isclose(stated, expected, rel_tol=1e-6)
    return type(stated) is type(expected) and stated == expected


def _as_json(value: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(value, allow_nan=False))


def _keeping_key(plan: Plan, keep: bool) -> Plan:
    recipe = plan.recipe.model_copy(update={"run": plan.recipe.run.model_copy(update={"keep_key": keep})})
    return dataclasses.replace(plan, recipe=recipe)


def _metadata(path: Path) -> tuple[Any, config.Recipe]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            return json.loads(metadata["sfumato"]), config.parse(tomllib.loads(metadata["recipe"]))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is missing or damaged. Restore it from a copy, or train again.") from None


def _compare_weights(path: Path, checkpoint: Checkpoint) -> None:
    """The published weights are the first average of the last update's state, bit for bit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from safetensors.torch import save as to_bytes

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): value for name, value in checkpoint.tensors.items() if name.startswith(prefix)}

    try:
        same = to_bytes(load_file(path)) == to_bytes({**named("model."), **named("ema.0.")})
    except (OSError, SafetensorError, ValueError):
        same = False
    if not same:
        raise InputError(f"{path} holds other weights than this run's last checkpoint: it was altered, or is another run's. Restore it from a copy.")


def _refuse_other_types(folder: Path, result: Any, num_classes: int) -> None:
    """A damaged measurement is no reason for a page that breaks off half-way."""
    lines = JsonLines(folder / "metrics.jsonl").read()
    for path, kind, values in ((folder / "result.json", _Result, [result]), (folder / "metrics.jsonl", _Measured, lines)):
        try:
            for value in values:
                kind.model_validate(value, strict=True)
        except pydantic.ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise InputError(f"{path} is damaged: {where} is missing or of another type. Restore it from a copy.") from None
    if len(result["per_class"]) != num_classes:
        raise InputError(f"{folder / 'result.json'} is damaged: per_class has not {num_classes} numbers. Restore it from a copy.")
