"""Whether a finished run's files claim what its ledger and its recipe give, before anything of them is believed or told
again.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sfumato import config
from sfumato.accounting.accountants import EpsilonCurve
from sfumato.errors import InputError
from sfumato.json_record import pick
from sfumato.models.weights import Weights
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan, why_not_private
from sfumato.run_folder import launch, ledger, record
from sfumato.run_folder.certificate import certificate, counted, inputs_of_the_recipe, repeated
from sfumato.run_folder.record import Certificate, Metrics, PublicInputs, Result, ResultClaims, WeightsFacts
from sfumato.run_folder.tested import EVALUATION_FILE, Tested

DENSEST = 20
"""Bytes of a model file for each that it takes on the disk, or packed: weights hardly compress."""
_MOST_OF_HEADER = 2**23


def verify_run(folder: Path) -> tuple[Certificate, Result]:
    """Certificate and result of a finished run, once they are what the folder's own recipe, ledger and weights give.
    Nothing is written.

    Raises:
        InputError: Naming the file that does not belong, or that is missing or damaged.
    """
    stated, result, wrong = compare_run(folder)
    if wrong:
        raise InputError(f"{wrong[0]}. Restore the folder from a copy.")
    return stated, result


def compare_run(folder: Path) -> tuple[Certificate, Result, list[str]]:
    """Certificate and result of a finished run, and each statement in which its files disagree.

    What a certificate states of the images (`PublicInputs`) is believed, but for the number of examples, which the
    ledger has too. This finds mistakes, mixed files and false claims; whoever writes all files anew is not found.

    Raises:
        InputError: Where a file is missing or damaged, or the ledger is of another plan than the recipe.
    """
    path = folder / record.CERTIFICATE_FILE
    lines = ledger.read(folder / ledger.LEDGER_FILE)
    stated = record.read(path, Certificate)
    result = record.read(folder / record.RESULT_FILE, Result)
    recipe = config.parse_resolved(config.read(folder / "recipe.toml"))
    plan = _plan_of(recipe, stated.public_inputs, lines)
    expected = launch.run_line(plan).model_copy(update=pick(lines.run, "budget"))
    launch.refuse_another_plan(lines.run, expected, folder / ledger.LEDGER_FILE)
    if lines.num_releases != lines.run.num_steps:
        raise InputError(
            f"{folder / record.RESULT_FILE} stands beside a ledger of {lines.num_releases} of {lines.run.num_steps} "
            "releases. Restore the folder from a copy, or take the result away to go on with the run."
        )
    # Which of its last releases a model has, after a crash, the ledger cannot say: at most the last one's step.
    last = lines.releases[-1].step if lines.releases else 0
    step = stated.num_applied if 0 <= stated.num_applied <= last else -1
    sha256 = ledger.sha256_of(folder / ledger.LEDGER_FILE)
    facts, own_recipe, tensors, _ = read_model_file(folder / record.WEIGHTS_FILE)
    # An attack's result, the day and the software are nothing that the ledger claims.
    whole = claims(plan, plan.mechanism)
    so_far = whole.epsilon if plan.selection is None else None
    counts = counted(lines, step, so_far, sha256) | pick(stated, "budget")
    truth = certificate(plan, whole, "complete", stated.public_inputs, counts).model_copy(
        update=pick(stated, "audit", "finished_on", "software") | {"weights_sha256": Weights(tensors).digest}
    )
    weights = folder / record.WEIGHTS_FILE
    # A search reserves for all its trials, and no ledger of one says so.
    budget_id = stated.budget.budget_id if stated.budget and plan.selection is None else None
    wrong = [
        *_differing(path, dict(stated.public_inputs), inputs_of_the_recipe(recipe)),
        *_differing(path, stated.model_dump(), truth.model_dump()),
        *_differing(path, {"budget": budget_id}, pick(lines.run, "budget")),
        *_differing(folder / record.RESULT_FILE, dict(result), dict(repeated(ResultClaims, truth))),
        *_differing(weights, dict(facts), dict(repeated(WeightsFacts, truth))),
        *_differing(weights, config.releasing_keys(own_recipe), config.releasing_keys(recipe)),
    ]
    metrics = record.read_lines(folder / record.METRICS_FILE, Metrics)
    wrong += _too_low(folder / record.METRICS_FILE, metrics, plan) if whole.holds and plan.selection is None else []
    if (folder / EVALUATION_FILE).exists():
        record.read(folder / EVALUATION_FILE, Tested)
    return stated, result, wrong


def refuted(folder: Path, stated: Certificate) -> list[str]:
    """Whether an audit of the run refuted its claim: one line, or none."""
    if stated.audit is None or not stated.audit.violated:
        return []
    path = folder / record.CERTIFICATE_FILE
    return [f"{path} tells of an attack that refutes what it claims: find out why before you hand it on"]


def _too_low(path: Path, metrics: list[Metrics], plan: Plan) -> list[str]:
    """Whether an epsilon on the way is below that of as many updates: one line, or none. Lost ones make it higher."""
    curve = EpsilonCurve(plan.mechanism, plan.delta, plan.recipe.budget.accountant)
    low = [line.step for line in metrics if (line.epsilon or 0.0) < curve.at(max(0, line.step)) * (1 - 1e-6)]
    return [f"{path} states less epsilon for step {low[0]} than its updates cost"] if low else []


def _plan_of(recipe: config.ResolvedRecipe, public: PublicInputs, lines: ledger.Lines) -> Plan:
    """What was planned, of a recipe in which every value is set."""
    draws_people = recipe.privacy is not None and recipe.privacy.person_sampling == "persons"
    drawn = (public.num_people if draws_people else public.num_examples) or 0
    planned = lines.run.mechanism.replace(
        num_examples=max(1, drawn + recipe.audit.canaries), num_steps=recipe.training.num_steps
    )
    if recipe.privacy is not None:
        planned = planned.replace(
            batch_size=min(recipe.training.batch_size, planned.num_examples),
            **pick(recipe.privacy, "noise_multiplier", "sampling", "images_per_unit"),
        )
    return Plan(recipe, planned, why_not_private(recipe, planned))


def _differing(path: Path, stated: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not stated as it is expected: one line, or none."""
    wrong = [key for key, value in expected.items() if key not in stated or not _alike(stated[key], value)]
    return [f"{path} states another {', '.join(wrong)} than the run's ledger and recipe give"] if wrong else []


def _alike(stated: Any, expected: Any) -> bool:
    """Equal, but for the last digits of numbers, which another kind of processor computes otherwise."""
    if isinstance(expected, dict) and isinstance(stated, dict):
        return stated.keys() == expected.keys() and all(_alike(stated[key], expected[key]) for key in expected)
    if type(expected) is float and type(stated) in (int, float):
        return math.isclose(stated, expected, rel_tol=1e-6)
    return type(stated) is type(expected) and bool(stated == expected)


def read_model_file(path: Path) -> tuple[WeightsFacts, config.ResolvedRecipe, dict[str, torch.Tensor], dict[str, str]]:
    """What stands in model.safetensors, as a run writes it: its metadata last.

    Raises:
        InputError: If it is missing or damaged.
    """
    _refuse_bomb(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        facts = WeightsFacts.model_validate_json(metadata["sfumato"])
        return facts, config.parse_resolved(config.loads(metadata["recipe"])), tensors, metadata
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path} is damaged, or is not there. Restore it from a copy, or train again.") from None


def _refuse_bomb(path: Path) -> None:
    """Raises InputError where a small file would take all memory: most of it is a hole, or its header is huge."""
    if not path.is_file():
        return
    found = path.stat()
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if found.st_size > DENSEST * found.st_blocks * 512 + 2**16 or header > _MOST_OF_HEADER:
        why = f"it has a hole, or a header of {header} bytes"
        raise InputError(f"{path} is no model file of a run: {why}. Restore it from a copy.")
