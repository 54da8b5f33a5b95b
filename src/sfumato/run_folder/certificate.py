"""privacy.json: what a run claims, and what it does not."""

import hashlib
from pathlib import Path
from typing import Any, Literal

from sfumato.accounting.mechanism import Mechanism
from sfumato.config import ResolvedRecipe
from sfumato.data.examples import Dataset
from sfumato.errors import InputError
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import Certificate, PublicInputs, ResultClaims, WeightsFacts

HELD_OUT = (
    "held-out images, on which accuracies are computed and probabilities calibrated: they get no guarantee, and the "
    "accuracies are not private"
)
SCORED = (
    "test images, on which accuracies are computed and probabilities calibrated: they get no guarantee, and the "
    "accuracies are not private; the validation images, by whose noisy score this run was selected, are "
    "covered, unreadable ones and labels included"
)
UNSEARCHED = (
    "the choice of hyper-parameters: no search is recorded here, and one that looked at these images is not covered"
)
FROM_SCRATCH = "pre-training data: there was none, training began from random weights"
SEVERAL_IMAGES = "several images of one person, beyond what epsilon_person says"
PERSONS = "a person who has other images under another name: which images are one person's was taken as stated"
ONE_OF_MANY = (
    "one image more or less of a person who takes part: the guarantee is for whether a person takes part; for this "
    "change epsilon may be twice as large"
)
OTHER_RUNS = "other runs on the same images: their epsilons add up"
RUNNING_TIME = "the running time of the training"
NOT_COVERED = [  # lines are replaced where something else is known
    UNSEARCHED,
    FROM_SCRATCH,
    SEVERAL_IMAGES,
    OTHER_RUNS,
    RUNNING_TIME,
    HELD_OUT,
    "public_inputs: they were taken to be known to everybody, and are published as they are",
    "metrics_private.jsonl, data_root, init_from and checkpoints/: for the owner alone; and decoded copies of images, "
    "which the cache of the machine that trained may keep (sfumato cache list)",
]
SEARCH = {
    "private": "the search on the private data is not covered: hyper-parameters were chosen by simulations on these "
    "images",
    "public": "a search beside the one on public images that chose the hyper-parameters, if it looked at these images",
}
SELECTION = [
    "a search beside the selection of this run from a random number of private ones, which epsilon covers",
    "anyone who learns how many runs there were, or sees another of them",
]
COINS = "audit_private.json, which says which canaries took part: for the owner alone"
KEY_KEPT = "anyone who reads the file `key`, which this run keeps: it regenerates the noise"


def released(plan: Plan, ledger: Ledger) -> Mechanism:
    """The mechanism whose num_steps counts what was released; of ordinary training, whose updates
    nobody counts, the planned one.

    Raises:
        InputError: If the lines do not form a ledger.
    """
    spent = spent_mechanism(ledger.lines)
    if plan.recipe.privacy is None:
        return plan.mechanism
    return spent


def certificate(
    plan: Plan, mechanism: Mechanism, ledger: Ledger, status: Literal["running", "complete"], public: PublicInputs
) -> Certificate:
    """What was released, or will have been.

    Args:
        plan: The resolved run.
        mechanism: Its num_steps counts every release: those in the ledger when the run
            has ended; while it is running also those still planned, so that the number
            read from the file is never below what was spent.
        ledger: Its line count and head are stated.
        status: "running" or "complete".
        public: What is taken to be public about the images.
    """
    privacy = plan.recipe.privacy
    return Certificate(
        **dict(claims(plan, mechanism)),
        status=status,
        **counted(mechanism, ledger),
        clipping_norm=privacy.clipping_norm if privacy else None,
        public_inputs=public,
        precision=plan.recipe.training.precision,
        not_covered=not_covered(plan),
    )


def counted(mechanism: Mechanism, ledger: Ledger) -> dict[str, Any]:
    """The mechanism as a certificate states it, and the ledger that it was counted on."""
    return {
        "sampling": mechanism.sampling,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_prob": mechanism.sampling_prob,
        "batch_size": mechanism.batch_size,
        "num_examples": mechanism.num_examples,
        "num_steps": mechanism.num_steps,
        "first_release_noise": mechanism.first_release_noise,
        "run_id": ledger.lines[0]["run_id"],
        "ledger_lines": len(ledger.lines),
        "ledger_head": ledger.head,
    }


def finished(claim: Certificate, weights: Path, day: str | None) -> Certificate:
    """The certificate of these weights.

    Raises:
        InputError: If they cannot be read.
    """
    try:
        digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"{weights} cannot be read: {error.strerror}. Restore it from a copy.") from None
    return claim.model_copy(update={"weights_sha256": digest, "finished_on": day})


def not_covered(plan: Plan) -> list[str]:
    """What the claims say nothing about, a line each."""
    lines = list(NOT_COVERED)
    if plan.recipe.privacy is not None and plan.recipe.privacy.unit == "person":
        at = lines.index(SEVERAL_IMAGES)
        lines[at : at + 1] = [PERSONS, ONE_OF_MANY] if plan.recipe.privacy.person_sampling == "persons" else [PERSONS]
    if plan.recipe.model.pretrained_on is not None:
        lines[lines.index(FROM_SCRATCH)] = f"pre-training data: {plan.recipe.model.pretrained_on}"
    if plan.recipe.privacy is not None and plan.recipe.privacy.search_data is not None:
        lines[0] = SEARCH[plan.recipe.privacy.search_data]
    if plan.selection is not None:
        lines[:1] = SELECTION
        if plan.selection.score_noise is not None:
            lines[lines.index(HELD_OUT)] = SCORED
    if plan.recipe.audit.canaries:
        lines.append(COINS)
    return [*lines, KEY_KEPT] if plan.recipe.run.keep_key else lines


def result_claims(certificate: Certificate) -> ResultClaims:
    """What of a certificate result.json repeats."""
    kept = {key: value for key, value in certificate if key in ResultClaims.model_fields}
    return ResultClaims(**kept, classes=certificate.public_inputs.classes)


def weights_facts(certificate: Certificate) -> WeightsFacts:
    """What of a certificate and of the public inputs the metadata of model.safetensors repeats."""
    known = {**dict(certificate), **dict(certificate.public_inputs)}
    return WeightsFacts(**{key: known[key] for key in WeightsFacts.model_fields})


def public_inputs(plan: Plan, dataset: Dataset) -> PublicInputs:
    """What the guarantee takes to be known to everybody."""
    return PublicInputs(
        num_examples=len(dataset.train),
        num_people=dataset.facts.num_people,
        num_held_out=len(dataset.held_out_files),
        classes=list(dataset.classes),
        image_size=dataset.image_size,
        channels=dataset.channels,
        mean=list(dataset.mean),
        std=list(dataset.std),
        **inputs_of_the_recipe(plan.recipe),
    )


def inputs_of_the_recipe(recipe: ResolvedRecipe) -> dict[str, Any]:
    """What of the public inputs no image is needed for."""
    data = recipe.data
    named = f"the data set {data.name}" if data.name != "folder" else "the names of the class folders"
    return {
        "num_canaries": recipe.audit.canaries,
        "classes_from": named if data.name != "folder" or data.classes is None else "data.classes",
        "class_proportions": data.class_proportions,
        "split": data.split,
        "group_by": data.group_by,
        "init_sha256": recipe.model.init_sha256,
        "pretrained_on": recipe.model.pretrained_on,
    }
