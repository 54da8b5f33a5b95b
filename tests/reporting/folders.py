"""Run folders written by hand, as a run would leave them."""

import json
from pathlib import Path
from typing import Any

PRIVATE_LOSS = 1.2345678901
_OF_IMAGES = {"loss": PRIVATE_LOSS, "clipped_fraction": 0.777123, "grad_norm": 1.0, "clipped_square": 0.5}
PRIVATE_LINE: dict[str, Any] = {"step": 6, **_OF_IMAGES, "seconds": 1.5, "phases": {}}

RECIPE = """
data = { name = "digits", split = "train+valid" }
[model]
name = "small_cnn"
[model.options]
[augmentation]
kind = "none"
augmult = 0
[privacy]
target_epsilon = 3.0
delta = 0.0001
noise_multiplier = 3.142
clipping_norm = 1.0
sampling = "poisson"
accountant = "pld"
[optimizer]
name = "sgd"
learning_rate = 2.0
momentum = 0.0
[ema]
decay = 0.9
[training]
batch_size = 512
num_steps = 60
"""

NUMBERS: dict[str, Any] = {
    "sampling": "poisson",
    "noise_multiplier": 3.142,
    "sampling_prob": 512 / 1437,
    "batch_size": 512,
    "num_examples": 1437,
    "num_steps": 60,
    "clipping_norm": 1.0,
    "format_version": 1,
    "num_lost": 0,
    "num_applied": 60,
    "epsilon_so_far": None,
    "run_id": "0f" * 16,
    "ledger_lines": 61,
    "ledger_sha256": "5d41402abc4b2a76b9719d911017c592" * 2,
    "precision": "float32",
    "not_covered": ["other runs on the same images: their epsilons add up", "the running time of the training"],
}
IN_RESULT = (
    "format_version num_lost num_applied epsilon_so_far run_id noise_multiplier batch_size num_examples num_steps"
).split()
PUBLIC: dict[str, Any] = {
    "num_examples": 1437,
    "num_canaries": 0,
    "num_held_out": 360,
    "classes_from": "the data set digits",
    "image_size": 8,
    "channels": 1,
    "mean": [0.5],
    "std": [0.5],
    "split": "train+valid",
    **dict.fromkeys(("num_people", "class_proportions", "group_by", "init_sha256", "pretrained_on")),
}
RELATION = "one image's contribution replaced by zero; the number of images is fixed and public"


def attacker(accuracy: float) -> dict[str, Any]:
    """What somebody can tell, of a certificate."""
    rates = {"true_positives_at_1_percent": 0.0684, "true_positives_at_0_1_percent": 0.0127}
    one = {"candidates": 1437, "singled_out": 0.0091}
    return {"advantage": 2 * accuracy - 1, "accuracy": accuracy, **rates, **one, "source": "pld"}


def private_certificate(**changes: Any) -> dict[str, Any]:
    """privacy.json of a private run."""
    claim = {
        "status": "complete",
        "private": True,
        "why_not_private": None,
        "epsilon": 2.996123,
        "epsilon_rdp": 3.2104,
        "epsilon_pld": 2.996123,
        "delta": 0.0001,
        "accountant": "pld",
        "accountant_note": None,
        "relation": RELATION,
        "unit": "one image",
        "attacker": attacker(0.65498),
    }
    return {**claim, **NUMBERS, **changes}


def public_certificate(**changes: Any) -> dict[str, Any]:
    """privacy.json of a run whose noise comes from a public seed."""
    claim = private_certificate(private=False, why_not_private="its randomness comes from a public seed", attacker=None)
    by = "epsilon", "epsilon_rdp", "epsilon_pld"
    return claim | dict.fromkeys(by) | {f"{name}_if_private": claim[name] for name in by} | changes


def ordinary_certificate(**changes: Any) -> dict[str, Any]:
    """privacy.json of ordinary training."""
    why_not = "this is ordinary training, without a budget and without noise"
    claim = {"status": "complete", "private": False, "why_not_private": why_not}
    claim |= dict.fromkeys(("epsilon", "epsilon_rdp", "epsilon_pld", "delta"))
    return {**claim, **NUMBERS, "sampling": "shuffled", "noise_multiplier": 0.0, "clipping_norm": None, **changes}


def finished(classes: list[str], **changes: Any) -> dict[str, Any]:
    """result.json of a run over these classes; the accuracies differ from class to class."""
    per_class = [0.88 + 0.11 * (7 * i % len(classes)) / len(classes) for i in range(len(classes))]
    result = {
        **{key: NUMBERS[key] for key in IN_RESULT},
        "private": True,
        "why_not_private": None,
        **dict.fromkeys(("epsilon", "epsilon_pld"), 2.996123),
        "epsilon_rdp": 3.2104,
        "delta": 0.0001,
        "run": "/somewhere/else",
        "held_out": "test",
        **_twice(accuracy=0.9638888, accuracy_last=0.9583333, accuracy_top5=0.9972222 if len(classes) >= 6 else None),
        "accuracy_interval": [0.9398888, 0.9788888],
        "test_views": 0,
        "accuracy_augtest_vote": None,
        "accuracy_augtest_mean": None,
        "num_parameters": 12_345,
        "balanced_accuracy": 0.9612345,
        "per_class": per_class,
        "auroc": 0.87654 if len(classes) == 2 else None,
        "majority_rate": 0.1055555 if len(classes) > 2 else 0.75,
        "classes": classes,
        "images_per_second": 54321.0,
        "seconds": 27.1828,
    }
    of_test = {key: value for key, value in changes.items() if key.startswith("accuracy") and "interval" not in key}
    return {**result, **_twice(**of_test), **changes}


def _twice(**accuracies: float | None) -> dict[str, float | None]:
    """Accuracies on the test split, under both names."""
    with_views = ("accuracy_augtest_vote", "accuracy_augtest_mean")
    return {**accuracies, **{f"test_{key}": value for key, value in accuracies.items() if key not in with_views}}


def curve(num_lines: int, *, private: bool = True) -> list[dict[str, Any]]:
    """metrics.jsonl of a run that learns."""
    lines = range(1, num_lines + 1)
    accuracies = ({"accuracy": 0.9638888 - 0.6 * 0.5**i, "accuracy_last": 0.9583333 - 0.4 * 0.6**i} for i in lines)
    spent = (2.996123 * (i / num_lines) ** 0.5 if private else None for i in lines)
    return [{"step": 6 * i, "epsilon": each} | of for i, each, of in zip(lines, spent, accuracies, strict=True)]


def write_run(
    folder: Path,
    privacy: dict[str, Any],
    result: dict[str, Any] | None,
    metrics: list[dict[str, Any]],
    recipe: str = RECIPE,
) -> Path:
    """A run folder, with the files that nobody else may see."""
    folder.mkdir(parents=True)
    classes = result["classes"] if result else [str(digit) for digit in range(10)]
    (folder / "privacy.json").write_text(json.dumps({"public_inputs": {**PUBLIC, "classes": classes}, **privacy}))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "owner" / "checkpoints").mkdir(parents=True)
    (folder / "owner" / "metrics_private.jsonl").write_text(json.dumps(PRIVATE_LINE) + "\n")
    (folder / "recipe.toml").write_text(recipe)
    return folder
