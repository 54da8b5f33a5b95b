"""Whether a finished run's files claim what its ledger and its recipe give, before anything of them
is believed or told again.
"""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import torch

from sfumato import config
from sfumato.data.examples import Dataset
from sfumato.errors import InputError
from sfumato.json_record import Record
from sfumato.planning.resolve import Plan, why_not_private
from sfumato.run_folder import checkpoint as checkpoints
from sfumato.run_folder import key_file, record
from sfumato.run_folder import session as sessions
from sfumato.run_folder.certificate import (
    certificate,
    finished,
    inputs_of_the_recipe,
    not_covered,
    public_inputs,
    released,
    result_claims,
    weights_facts,
)
from sfumato.run_folder.checkpoint import Checkpoint
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import Certificate, Metrics, PublicInputs, Result, WeightsFacts


def verify_finished(folder: Path, plan: Plan, dataset: Dataset) -> Result:
    """Believes a run folder that says it is complete only if everything in it agrees. Nothing is
    written.

    While the key is there, ledger and newest checkpoint are authenticated under it, as a resume
    does, and the weights must be the checkpoint's. Without a key ledger.head's count and last line
    are compared with the ledger.

    Returns:
        The result, as the run printed it.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    public = public_inputs(plan, dataset)
    if not key_file.has_key(folder):
        ledger = Ledger.open(folder / "ledger.jsonl")
        ledger.refuse_another_head()
        return verify(folder, plan, public, ledger)
    ledger, checkpoint = sessions.authenticated(folder, plan, dataset)
    result = verify(folder, plan, public, ledger)
    _compare_weights(folder / "model.safetensors", checkpoint)
    return result


def verify_without_images(folder: Path) -> Certificate:
    """The certificate of a finished run, once it is what the folder's own recipe and ledger give. Nothing is
    written.

    What a certificate states of the images (`PublicInputs`) is believed, but for the number of examples: the ledger
    has that. Else it finds what `verify` finds.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    ledger = Ledger.open(folder / "ledger.jsonl")
    has_key = key_file.has_key(folder)
    if has_key:
        ledger.appends_under(key_file.read_key(folder))
    else:
        ledger.refuse_another_head()
    stated = record.read(folder / record.CERTIFICATE_FILE, Certificate)
    recipe = config.parse_resolved(config.read(folder / "recipe.toml"))
    _refuse_another(folder / record.CERTIFICATE_FILE, dict(stated.public_inputs), inputs_of_the_recipe(recipe))
    plan = _plan_of(recipe, stated.public_inputs, ledger)
    verify(folder, plan, stated.public_inputs, ledger)
    if has_key and checkpoints.paths(folder):  # which may be deleted where space is short
        _, checkpoint = sessions.authenticated(folder, plan, None)
        _compare_weights(folder / "model.safetensors", checkpoint)
    return stated


def _plan_of(recipe: config.ResolvedRecipe, public: PublicInputs, ledger: Ledger) -> Plan:
    """What was planned, of a recipe in which every value is set, and of what the ledger's first line states beside."""
    draws_people = recipe.privacy is not None and recipe.privacy.person_sampling == "persons"
    drawn = public.num_people if draws_people else public.num_examples
    planned = spent_mechanism(ledger.lines).replace(
        num_examples=(drawn or 0) + recipe.audit.canaries,
        batch_size=recipe.training.batch_size,
        num_steps=recipe.training.num_steps,
        first_release_noise=ledger.lines[0]["first_release_noise"],
    )
    if recipe.privacy is not None:
        planned = planned.replace(noise_multiplier=recipe.privacy.noise_multiplier, sampling=recipe.privacy.sampling)
    reason = why_not_private(recipe, planned)
    return Plan(recipe, planned, reason is None, reason, [], [])


def verify(folder: Path, plan: Plan, public: PublicInputs, ledger: Ledger) -> Result:
    """Compares certificate, result and weights with what is computed anew from the plan and the
    ledger.

    Without a key this finds mistakes, mixed files and altered claims; whoever writes all files
    anew, ledger included, is not found.

    Returns:
        The result.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    spent = released(plan, ledger)
    sessions.refuse_another_recipe(ledger, plan)
    sessions.refuse_incomplete(folder, plan, ledger)
    truth = certificate(plan, spent, ledger, "complete", public)
    stated = record.read(folder / record.CERTIFICATE_FILE, Certificate)
    result = record.read(folder / record.RESULT_FILE, Result)
    if stated.not_covered == not_covered(_keeping_key(plan, not plan.recipe.run.keep_key)):
        # `run.keep_key` may be another than when the run ended.
        truth = truth.model_copy(update={"not_covered": stated.not_covered})
    truth = truth.model_copy(update={"audit": stated.audit})  # an attack's result: nothing that the ledger claims
    truth = finished(truth, folder / "model.safetensors", stated.finished_on)
    _compare(folder / record.CERTIFICATE_FILE, stated, truth)
    _compare(folder / record.RESULT_FILE, result, result_claims(truth))
    facts, recipe = _metadata(folder / "model.safetensors")
    _compare(folder / "model.safetensors", facts, weights_facts(truth))
    _refuse_another(folder / "model.safetensors", config.releasing_keys(recipe), config.releasing_keys(plan.recipe))
    record.read_lines(folder / record.METRICS_FILE, Metrics)
    return result


def _compare(path: Path, stated: Record, expected: Record) -> None:
    """Every value that is expected must be stated alike."""
    _refuse_another(path, dict(stated), dict(expected))


def _refuse_another(path: Path, stated: dict[str, Any], expected: dict[str, Any]) -> None:
    wrong = next((key for key, value in expected.items() if key not in stated or not _alike(stated[key], value)), None)
    if wrong is not None:
        raise InputError(
            f"{path} states another {wrong} than this run's ledger and recipe give: it was altered, or is another "
            "run's. Restore the folder from a copy."
        )


def _alike(stated: Any, expected: Any) -> bool:
    """Equal, but for the last digits of numbers, which another kind of processor computes otherwise."""
    if type(expected) is float and type(stated) in (int, float):
        return stated == expected or math.isclose(stated, expected, rel_tol=1e-6)
    if type(stated) is not type(expected):
        return False
    if isinstance(expected, Record):
        stated, expected = dict(stated), dict(expected)
    if isinstance(expected, dict):
        return stated.keys() == expected.keys() and all(_alike(stated[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(stated) == len(expected) and all(map(_alike, stated, expected))
    return bool(stated == expected)


def _keeping_key(plan: Plan, keep: bool) -> Plan:
    recipe = plan.recipe.model_copy(update={"run": plan.recipe.run.model_copy(update={"keep_key": keep})})
    return dataclasses.replace(plan, recipe=recipe)


def _metadata(path: Path) -> tuple[WeightsFacts, config.Recipe]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            return WeightsFacts.model_validate_json(metadata["sfumato"]), config.parse(
                tomllib.loads(metadata["recipe"])
            )
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is missing or damaged. Restore it from a copy, or train again.") from None


def _compare_weights(path: Path, checkpoint: Checkpoint) -> None:
    """The published weights are the first average of the last update's state, bit for bit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from safetensors.torch import save as to_bytes

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(prefix): value for name, value in checkpoint.tensors.items() if name.startswith(prefix)
        }

    try:
        same = to_bytes(load_file(path)) == to_bytes({**named("model."), **named("ema.0.")})
    except (OSError, SafetensorError, ValueError):
        same = False
    if not same:
        raise InputError(
            f"{path} holds other weights than this run's last checkpoint: it was altered, or is "
            "another run's. Restore it from a copy."
        )
