"""privacy.json: what a run claims, and what it does not."""

from typing import Any

from sfumato.accounting.mechanism import Mechanism
from sfumato.data.dataset import Dataset
from sfumato.planning.resolve import Plan
from sfumato.run_folder.ledger import Ledger

RELATION = "one image's contribution replaced by zero; the number of images is fixed and public (the same epsilon as adding or removing one image)"
HELD_OUT = "held-out images, on which accuracies are computed: they get no guarantee, and the accuracies are not private"
SCORED = (
    "test images, on which accuracies are computed: they get no guarantee, and the accuracies are not private; the "
    "validation images, by whose noisy score this run was selected, are covered, unreadable ones and labels included"
)
NOT_COVERED = [  # the first line is replaced where it is known how hyper-parameters were searched
    "the choice of hyper-parameters, if it looked at these images",
    "pre-training data, if the model started from other weights",
    "several images of one person, beyond what epsilon_person says",
    "other runs on the same images: their epsilons add up",
    "the running time of the training",
    HELD_OUT,
    "public_inputs: they were taken to be known to everybody, and are published as they are",
    "metrics_private.jsonl, data_root and checkpoints/: for the owner alone",
]
SEARCH = {
    "private": "the search on the private data is not covered: hyper-parameters were chosen by simulations on these images",
    "public": "a search beside the one on public images that chose the hyper-parameters, if it looked at these images",
}
SELECTION = [
    "a search beside the selection of this run from a random number of private ones, which epsilon covers",
    "anyone who learns how many runs there were, or sees another of them",
]


def certificate(plan: Plan, mechanism: Mechanism, ledger: Ledger, status: str, dataset: Dataset) -> dict[str, Any]:
    """What was released, or will have been, as one JSON object.

    Args:
        plan: The resolved run.
        mechanism: Its num_steps counts every release: those in the ledger when the run
            has ended; while it is running also those still planned, so that the number
            read from the file is never below what was spent.
        ledger: Its line count and head are stated.
        status: "running" or "complete".
        dataset: What is taken to be public about it is stated.
    """
    privacy = plan.recipe.privacy
    numbers = {
        "sampling": mechanism.sampling,
        "noise_multiplier": mechanism.noise_multiplier,
        "sampling_prob": mechanism.sampling_prob,
        "batch_size": mechanism.batch_size,
        "num_examples": mechanism.num_examples,
        "num_steps": mechanism.num_steps,
        "clipping_norm": privacy.clipping_norm if privacy else None,
        "run_id": ledger.lines[0]["run_id"],
        "ledger_lines": len(ledger.lines),
        "ledger_head": ledger.head,
    }
    not_covered = list(NOT_COVERED)
    if privacy is not None and privacy.search_data is not None:
        not_covered[0] = SEARCH[privacy.search_data]
    if plan.selection is not None:
        not_covered[:1] = SELECTION
        if plan.selection.score_noise is not None:
            not_covered[not_covered.index(HELD_OUT)] = SCORED
    if plan.recipe.run.keep_key:
        not_covered.append("anyone who reads the file `key`, which this run keeps: it regenerates the noise")
    public = public_inputs(plan, dataset)
    return {"status": status, "private": plan.private, **claims(plan, mechanism), **numbers, "public_inputs": public, "not_covered": not_covered}


def in_result(claim: dict[str, Any]) -> dict[str, Any]:
    """What of a certificate result.json repeats."""
    numbers = ("delta", "noise_multiplier", "batch_size", "num_steps", "num_examples")
    claims = {key: value for key, value in claim.items() if key.startswith(("private", "epsilon", "why", "max_images"))}
    return {"run_id": claim["run_id"], **claims, **{key: claim[key] for key in numbers}, "classes": claim["public_inputs"]["classes"]}


def in_weights(claim: dict[str, Any]) -> dict[str, Any]:
    """What of a certificate the metadata of model.safetensors repeats."""
    public = {key: claim["public_inputs"][key] for key in ("classes", "mean", "std", "image_size", "channels")}
    return {**public, **{key: claim[key] for key in ("run_id", "private", "epsilon", "delta", "ledger_lines", "ledger_head")}}


def public_inputs(plan: Plan, dataset: Dataset) -> dict[str, Any]:
    """What the guarantee takes to be known to everybody: the weights, the result and the report show it without noise."""
    data = plan.recipe.data
    named = f"the data set {data.name}" if data.name != "folder" else "the names of the class folders"
    return {
        "num_examples": len(dataset.train),
        "classes": list(dataset.classes),
        "classes_from": named if data.name != "folder" or data.classes is None else "data.classes",
        "class_proportions": data.class_proportions,
        "image_size": dataset.image_size,
        "channels": dataset.channels,
        "mean": list(dataset.mean),
        "std": list(dataset.std),
        "split": data.split,
        "group_by": data.group_by,
    }


def claims(plan: Plan, mechanism: Mechanism) -> dict[str, Any]:
    """Every epsilon of a mechanism under the plan's delta and accountant.

    Where the run is not private, ``epsilon`` is None and ``epsilon_if_private`` says what
    Poisson sampling with secret noise would have given.
    """
    from sfumato.accounting.accountants import epsilon

    privacy = plan.recipe.privacy
    if privacy is None:
        return {"why_not_private": plan.why_not_private, "epsilon": None, "epsilon_rdp": None, "epsilon_pld": None, "delta": None}
    if plan.selection is not None:  # the others may have taken all steps, whatever this one did
        mechanism = mechanism.replace(num_steps=max(mechanism.num_steps, plan.mechanism.num_steps))
    spent = epsilon(mechanism.replace(sampling="poisson"), plan.delta, privacy.accountant, plan.selection)
    values = {"epsilon": spent.epsilon, "epsilon_rdp": spent.epsilon_rdp, "epsilon_pld": spent.epsilon_pld}
    values = {name: finite(value) for name, value in values.items()}
    out: dict[str, Any] = {"why_not_private": plan.why_not_private}
    if plan.private:
        out.update(values)
    else:
        out.update({name: None for name in values})
        out.update({f"{name}_if_private": value for name, value in values.items()})
    out.update(delta=plan.delta, accountant=spent.accountant, accountant_note=spent.note, relation=RELATION, unit="one image")
    if plan.selection is not None:
        out |= {
            "selected_from": plan.selection.mean,
            "selection_shape": plan.selection.shape,
            "score_noise": plan.selection.score_noise,
            "epsilon_search_inclusive": out["epsilon"],
        }
    elif privacy.search_data is not None:
        out["epsilon_search_inclusive"] = out["epsilon"] if privacy.search_data == "public" else None
    if privacy.max_images_per_person is not None:
        from sfumato.accounting.user_level import epsilon_person

        person = finite(epsilon_person(mechanism, plan.delta, privacy.max_images_per_person))
        out["max_images_per_person"] = privacy.max_images_per_person
        out["epsilon_person" if plan.private else "epsilon_person_if_private"] = person
        out["person_groups"] = "checked" if plan.recipe.data.group_by else "declared, not checked"
    return out


def finite(value: float | None) -> float | None:
    """JSON has no Infinity: None where there is no finite number."""
    return value if value is not None and value < float("inf") else None
