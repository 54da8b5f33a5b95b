"""privacy.json: what a run claims, and what it does not."""

from typing import Any, Literal, TypeVar

from sfumato.config import ResolvedRecipe
from sfumato.data.examples import Dataset
from sfumato.data.pixels import RULES_VERSION
from sfumato.json_record import pick
from sfumato.models.weights import Fitted
from sfumato.planning.claims import Guarantee
from sfumato.planning.resolve import Plan
from sfumato.run_folder.ledger import Lines
from sfumato.run_folder.record import FORMAT_VERSION, Certificate, PublicInputs, ResultClaims, WeightsFacts

Repeats = TypeVar("Repeats", ResultClaims, WeightsFacts)
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
SEVERAL_IMAGES = "several images of one person, beyond what is stated for a person"
PERSONS = "a person who has other images under another name: which images are one person's was taken as stated"
ONE_OF_MANY = (
    "one image more or less of a person who takes part: the guarantee is for whether a person takes part; for this "
    "change epsilon may be twice as large"
)
OTHER_RUNS = "other runs on the same images: their epsilons add up"
OUTSIDE = (
    "runs on the same images that are not reserved in the budget; and a choice of noise, batch or number of updates "
    "by what earlier runs of the budget showed"
)
RUNNING_TIME = "the running time of the training"
COPIES = "a copy of this run's folder that was resumed: it is another run, and its epsilon adds up with this one's"
ENDS = (
    "ends of the training that depended on what is in an image, or on which or how many images were drawn; other "
    "crashes and stops cost nothing"
)
NOT_COVERED = [  # lines are replaced where something else is known
    UNSEARCHED,
    FROM_SCRATCH,
    SEVERAL_IMAGES,
    OTHER_RUNS,
    COPIES,
    ENDS,
    RUNNING_TIME,
    HELD_OUT,
    "the public inputs: they were taken to be known to everybody, and are published as they are",
    "the folder owner/: for the owner alone; and decoded copies of images, which the cache of the machine that trained "
    "may keep (sfumato cache list)",
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
COINS = "owner/canaries.json, which says which canaries took part: for the owner alone"


def certificate(
    plan: Plan, whole: Guarantee, status: Literal["running", "complete"], public: PublicInputs, counts: dict[str, Any]
) -> Certificate:
    """What a run claims: the epsilon of its whole plan, whenever it ends.

    Args:
        plan: The resolved run.
        whole: The claims of the whole plan.
        status: "running" or "complete".
        public: What is taken to be public about the images.
        counts: From `counted`; and ``budget``, what `Launch.reserve` found.
    """
    return Certificate(
        **dict(whole),
        status=status,
        **counts,
        public_inputs=public,
        precision=plan.recipe.training.precision,
        not_covered=not_covered(plan, has_budget=counts.get("budget") is not None),
    )


def counted(lines: Lines, step: int, epsilon_so_far: float | None, sha256: str) -> dict[str, Any]:
    """The plan as a certificate states it, and what of it was released.

    Args:
        lines: Of the ledger.
        step: Updates that the model has.
        epsilon_so_far: Of what the ledger counts, or an upper bound.
        sha256: Of the ledger's lines.
    """
    of_plan = ("run_id", "num_examples", "batch_size", "noise_multiplier", "num_steps", "sampling", "clipping_norm")
    return {
        **pick(lines.run, *of_plan),
        "format_version": FORMAT_VERSION,
        "sampling_prob": lines.run.mechanism.sampling_prob,
        "num_lost": lines.num_releases - step,
        "num_applied": step,
        "epsilon_so_far": epsilon_so_far,
        "ledger_lines": lines.count,
        "ledger_sha256": sha256,
    }


def not_covered(plan: Plan, *, has_budget: bool) -> list[str]:
    """What the claims say nothing about, a line each."""
    privacy, selection, other = plan.recipe.privacy, plan.selection, dict[str, list[str]]()
    if has_budget:
        other[OTHER_RUNS] = [OUTSIDE]
    if privacy is not None and privacy.unit == "person":
        other[SEVERAL_IMAGES] = [PERSONS, ONE_OF_MANY] if privacy.person_sampling == "persons" else [PERSONS]
    if plan.recipe.model.pretrained_on is not None:
        other[FROM_SCRATCH] = [f"pre-training data: {plan.recipe.model.pretrained_on}"]
    if privacy is not None and privacy.search_data is not None:
        other[UNSEARCHED] = [SEARCH[privacy.search_data]]
    if selection is not None:
        other[UNSEARCHED] = SELECTION
        if selection.score_noise is not None:
            other[HELD_OUT] = [SCORED]
    lines = [line for usual in NOT_COVERED for line in other.get(usual, [usual])]
    return [*lines, COINS] if plan.recipe.audit.canaries else lines


def repeated(kind: type[Repeats], certificate: Certificate) -> Repeats:
    """What of a certificate and its public inputs result.json (`ResultClaims`) or the metadata of model.safetensors
    (`WeightsFacts`) repeats.
    """
    known = {**dict(certificate.public_inputs), **dict(certificate)}
    return kind(**{key: known[key] for key in kind.model_fields})


def public_inputs(plan: Plan, dataset: Dataset, fitted: Fitted | None) -> PublicInputs:
    """What the guarantee takes to be known to everybody; `fitted`: how given weights met the network."""
    return PublicInputs(
        **pick(dataset.facts, "num_examples", "num_people", "image_size", "channels"),
        num_held_out=len(dataset.held_out_files),
        classes=list(dataset.classes),
        mean=list(dataset.train.mean),
        std=list(dataset.train.std),
        decoding_rules=RULES_VERSION,
        init_adapted=fitted.adapted if fitted else [],
        **inputs_of_the_recipe(plan.recipe),
    )


def inputs_of_the_recipe(recipe: ResolvedRecipe) -> dict[str, Any]:
    """What of the public inputs no image is needed for."""
    data = recipe.data
    named = f"the data set {data.name}" if data.name != "folder" else "the names of the class folders"
    return {
        "num_canaries": recipe.audit.canaries,
        "classes_from": named if data.name != "folder" or data.classes is None else "the recipe",
        **pick(data, "class_proportions", "split", "group_by"),
        **pick(recipe.model, "init_sha256", "pretrained_on"),
    }
