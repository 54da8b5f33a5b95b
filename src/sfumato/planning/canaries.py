"""Canaries in a plan: they count in N, and are for runs whose claim an audit can try."""

import dataclasses

from sfumato.config import Recipe
from sfumato.data.catalogue import Facts
from sfumato.errors import InputError

_ONE_IN = 20


def counted(recipe: Recipe, facts: Facts) -> Facts:
    """The public numbers with the canaries among N, in or out: one that takes no part keeps its place and
    contributes zero, as an image that cannot be read does.

    Raises:
        InputError: If there are too many, or the recipe's claim is not that of one example.
    """
    count = recipe.audit.canaries
    if not count:
        return facts
    why_not = _why_not(recipe)
    if why_not is not None:
        raise InputError(f"audit.canaries = {count} {why_not}. Set audit.canaries=0.")
    most = facts.num_examples // (_ONE_IN - 1)
    if count > most:
        raise InputError(
            f"audit.canaries = {count} is more than 5 % of all examples: beside {facts.num_examples} images at most "
            f"{most} are allowed. Set audit.canaries={most} or less."
        )
    return dataclasses.replace(facts, num_examples=facts.num_examples + count)


def refuse_without_claim(recipe: Recipe, why_not_private: str | None) -> None:
    """Raises InputError for canaries in a run that claims nothing.

    Args:
        recipe: Of the run.
        why_not_private: The reason; None: it claims an epsilon.
    """
    if recipe.audit.canaries and why_not_private is not None:
        raise InputError(
            f"audit.canaries = {recipe.audit.canaries} is to try the claim of a private run, and this one makes none: "
            f"{why_not_private}. Set audit.canaries=0."
        )


def _why_not(recipe: Recipe) -> str | None:
    privacy = recipe.privacy
    if privacy is None:
        return "is to try the claim of a private run, and this recipe has no [privacy] section"
    if recipe.data.group_by is not None or privacy.unit == "person":
        return "is for an epsilon of one image: canaries belong to no person (data.group_by, privacy.unit)"
    if recipe.model.releases_first:
        return 'is for training by updates alone, not for model.features = "centred"'
    if privacy.selected_from is not None:
        return "does not fit privacy.selected_from: which run is published would depend on the canaries' coins"
    return None
