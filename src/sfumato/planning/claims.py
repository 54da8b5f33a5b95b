"""What a mechanism costs: every epsilon that a plan, a certificate or a result states. No run is
needed for it.
"""

from typing import TYPE_CHECKING, Literal

from sfumato.accounting.accountants import Spent, epsilon
from sfumato.accounting.attacker import Attacker, attacker
from sfumato.accounting.gaussian import refuse_beyond_reach
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.config import FilledPrivacy
from sfumato.errors import InputError
from sfumato.json_record import Record, finite, pick
from sfumato.planning.solve import selection_of

if TYPE_CHECKING:
    from sfumato.planning.resolve import Plan

RELATION = (
    "one image's contribution replaced by zero; the number of images is fixed and public "
    "(the same epsilon as adding or removing one image)"
)
RELATION_OF_PERSONS = (
    "the contribution of all images of one person replaced by zero; the number of people and of images is fixed and "
    "public (the same epsilon as adding or removing one person)"
)
_DECLARED = "declared, not checked"
_ENFORCED = "as the owner states; of each group's training images no more than the limit were used"


class Guarantee(Record):
    """(epsilon, delta)-differential privacy for one unit, as every file of a run states it; where it does not hold,
    why not, and what secret noise and Poisson sampling would have given: the keys ``..._if_private``.

    Attributes:
        epsilon: Of the unit; by PLD, capped by RDP's, or by RDP where that is the accountant. None:
            not private, or infinite.
        unit: In words: one image, or one person with so many at most.
        drawn: What each update draws, and what N, q, the batch and delta count.
        epsilon_search_inclusive: The search for hyper-parameters included; None where none was
            made, or it is not covered.
        epsilon_image: Of one image alone, where the unit is a person and images are drawn.
        epsilon_person: For all images of one person together, so many at most; None where nothing is said of that.
        person_groups: Who says which images belong together, and whether the limit was enforced.
        attacker: What an attacker can tell of the unit.
        attacker_person: The same of a person.
    """

    private: bool
    why_not_private: str | None
    epsilon: float | None
    epsilon_rdp: float | None
    epsilon_pld: float | None
    epsilon_if_private: float | None = None
    epsilon_rdp_if_private: float | None = None
    epsilon_pld_if_private: float | None = None
    delta: float | None
    accountant: Accountant | None = None
    accountant_note: str | None = None
    relation: str | None = None
    unit: str | None = None
    drawn: Literal["images", "people"] = "images"
    selected_from: float | None = None
    selection_shape: float | None = None
    score_noise: float | None = None
    epsilon_search_inclusive: float | None = None
    epsilon_image: float | None = None
    epsilon_image_if_private: float | None = None
    max_images_per_person: int | None = None
    epsilon_person: float | None = None
    epsilon_person_if_private: float | None = None
    person_groups: str | None = None
    attacker: Attacker | None = None
    attacker_person: Attacker | None = None

    @property
    def holds(self) -> bool:
        """Whether anything is guaranteed: a finite epsilon, and of a private run. All else is no guarantee."""
        return self.private and None not in (self.epsilon, self.delta, self.accountant, self.unit)

    @property
    def of_persons(self) -> bool:
        """Whether the unit is a person."""
        return self.unit is not None and self.unit.startswith("one person")


def claims(plan: "Plan", mechanism: Mechanism) -> Guarantee:
    """Every epsilon of a mechanism under the plan's delta and accountant.

    Where the run is not private, ``epsilon`` is None and ``epsilon_if_private`` says what Poisson
    sampling with secret noise would have given.
    """
    privacy, selection, why_not = plan.recipe.privacy, plan.selection, plan.why_not_private
    if privacy is None:
        return Guarantee(
            private=False, why_not_private=why_not, epsilon=None, epsilon_rdp=None, epsilon_pld=None, delta=None
        )
    mechanism = mechanism.replace(sampling="poisson", images_per_unit=privacy.images_per_unit)
    if selection is not None:  # the others may have taken all steps, whatever this one did
        mechanism = mechanism.replace(num_steps=max(mechanism.num_steps, plan.mechanism.num_steps))
    spent = epsilon(mechanism, plan.delta, privacy.accountant, selection)
    return _stated(mechanism, privacy, spent, why_not, _ENFORCED if plan.recipe.data.group_by else _DECLARED)


def claims_of(mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> Guarantee:
    """Every epsilon of a mechanism that stands for itself, without a plan; its noise is taken to be secret.

    Raises:
        InputError: If no epsilon is known for it, it is infinite, or delta is too small for noise that is drawn.
    """
    refuse_beyond_reach(mechanism, delta)
    spent = epsilon(mechanism, delta, accountant)
    if finite(spent.epsilon) is None:
        raise InputError("without noise there is no epsilon to certify. Give the mechanism a noise multiplier.")
    limit = mechanism.images_per_unit if mechanism.images_per_unit > 1 else None
    unit = "image" if limit is None else "person"
    privacy = FilledPrivacy.model_construct(delta=delta, unit=unit, max_images_per_person=limit)
    return _stated(mechanism, privacy, spent, None, _DECLARED)


def _stated(mechanism: Mechanism, privacy: FilledPrivacy, spent: Spent, why_not: str | None, groups: str) -> Guarantee:
    """What ``spent`` is for the mechanism's unit, and what is spent beside for one image and for a person."""
    of_persons, limit, selection = privacy.unit == "person", privacy.max_images_per_person, selection_of(privacy)
    draws_people, delta = privacy.person_sampling == "persons", privacy.delta
    covers_search = selection is not None or privacy.search_data == "public"
    holds, image, person, of_all = why_not is None, None, None, None
    if of_persons:
        person, of_all = spent.epsilon, mechanism
    elif limit is not None and selection is None:
        of_all = mechanism.replace(images_per_unit=limit)
        person = epsilon(of_all, delta).epsilon
    if of_persons and not draws_people:
        image = epsilon(mechanism.replace(images_per_unit=1), delta).epsilon
    each = {**pick(spent, "epsilon", "epsilon_rdp", "epsilon_pld"), "epsilon_image": image, "epsilon_person": person}
    found = {name: finite(value) for name, value in each.items()}
    if not holds:
        found = dict.fromkeys(found) | {f"{name}_if_private": value for name, value in found.items()}
    return Guarantee(
        private=holds,
        why_not_private=why_not,
        **found,
        delta=delta,
        accountant=spent.accountant,
        accountant_note=spent.note,
        relation=RELATION_OF_PERSONS if of_persons else RELATION,
        unit=unit_in_words(limit if of_persons else None),
        drawn="people" if draws_people else "images",
        selected_from=None if selection is None else selection.mean,
        selection_shape=None if selection is None else selection.shape,
        score_noise=None if selection is None else selection.score_noise,
        epsilon_search_inclusive=found["epsilon"] if covers_search else None,
        max_images_per_person=limit,
        person_groups=None if limit is None else groups,
        attacker=attacker(mechanism, selection) if holds else None,
        attacker_person=attacker(of_all) if holds and of_all is not None else None,
    )


def unit_in_words(images_per_person: int | None) -> str:
    """Whom an epsilon is for; None: not for persons."""
    if images_per_person is None:
        return "one image"
    return f"one person with at most {images_per_person} image{'s' if images_per_person > 1 else ''}"
