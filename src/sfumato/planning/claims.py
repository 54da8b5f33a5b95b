"""What a mechanism costs: every epsilon that a plan, a certificate or a result states. No run is
needed for it.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

from sfumato.accounting.gaussian import refuse_beyond_reach
from sfumato.accounting.mechanism import Accountant, Mechanism
from sfumato.errors import InputError
from sfumato.json_record import Record, finite

if TYPE_CHECKING:
    from sfumato.accounting.selection import Selection
    from sfumato.planning.resolve import Plan

RELATION = (
    "one image's contribution replaced by zero; the number of images is fixed and public "
    "(the same epsilon as adding or removing one image)"
)
RELATION_OF_PERSONS = (
    "the contribution of all images of one person replaced by zero; the number of people and of images is fixed and "
    "public (the same epsilon as adding or removing one person)"
)


class AttackerClaims(Record):
    """What somebody who sees the model can tell, at most, of whether one unit (an image, or all images
    of one person) took part (`sfumato.accounting.attacker`).

    Attributes:
        advantage: True positives less false ones, at the best threshold.
        accuracy: Of guesses at even odds.
        true_positives_at_1_percent: At that rate of false positives.
        candidates: N images, or as many people as N images belong to at least.
        singled_out: How often somebody names the one of so many candidates that took part.
        source: "pld": the mechanism's own trade-off; "pairs": from several (epsilon, delta).
    """

    advantage: float
    accuracy: float
    true_positives_at_1_percent: float
    true_positives_at_0_1_percent: float
    candidates: int
    singled_out: float
    source: Literal["pld", "pairs"]


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta)-differential privacy for one unit.

    Attributes:
        unit: In words: one image, or one person with so many at most.
        image: Epsilon of one image alone, where the unit is a person.
        person: Epsilon for a person with several images, and how many at most; None where nothing
            is said of that.
        attacker: What an attacker can tell of the unit.
        attacker_person: The same of a person.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    unit: str
    image: float | None
    person: tuple[float | None, int] | None
    attacker: AttackerClaims | None
    attacker_person: AttackerClaims | None

    @property
    def of_persons(self) -> bool:
        """Whether the unit is a person."""
        return self.unit.startswith("one person")


class Claims(Record):
    """Every epsilon of a mechanism. One that is not private has none: "if private" says what secret
    noise would have given.

    Attributes:
        epsilon: Of the unit; by PLD, capped by RDP's, or by RDP where that is the accountant. None:
            not private, or infinite.
        epsilon_image: Of one image alone, where the unit is a person and images are drawn.
        drawn: What each update draws, and what N, q, the batch and delta count.
        epsilon_search_inclusive: The search for hyper-parameters included; None where none was
            made, or it is not covered.
        epsilon_person: For all images of one person together.
        person_groups: Who says which images belong together, and whether the limit was enforced.
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
    attacker: AttackerClaims | None = None
    attacker_person: AttackerClaims | None = None

    @property
    def guarantee(self) -> Guarantee | None:
        """What is guaranteed; None where nothing is."""
        return self._of(self.epsilon, self.epsilon_person, self.epsilon_image) if self.private else None

    @property
    def hypothetical(self) -> Guarantee | None:
        """What secret noise and Poisson sampling would have guaranteed; None where that is nothing,
        or something is guaranteed.
        """
        if self.private:
            return None
        return self._of(self.epsilon_if_private, self.epsilon_person_if_private, self.epsilon_image_if_private)

    def _of(self, epsilon: float | None, of_person: float | None, of_image: float | None) -> Guarantee | None:
        if epsilon is None or self.delta is None or self.accountant is None or self.unit is None:
            return None
        person = None if self.max_images_per_person is None else (of_person, self.max_images_per_person)
        return Guarantee(
            epsilon=epsilon,
            delta=self.delta,
            accountant=self.accountant,
            unit=self.unit,
            image=of_image,
            person=person,
            attacker=self.attacker,
            attacker_person=self.attacker_person,
        )


def claims(plan: "Plan", mechanism: Mechanism) -> Claims:
    """Every epsilon of a mechanism under the plan's delta and accountant.

    Where the run is not private, ``epsilon`` is None and ``epsilon_if_private`` says what Poisson
    sampling with secret noise would have given.
    """
    from sfumato.accounting.accountants import epsilon

    privacy = plan.recipe.privacy
    if privacy is None:
        return Claims(
            private=False,
            why_not_private=plan.why_not_private,
            epsilon=None,
            epsilon_rdp=None,
            epsilon_pld=None,
            delta=None,
        )
    mechanism = mechanism.replace(sampling="poisson", images_per_unit=privacy.images_per_unit)
    if plan.selection is not None:  # the others may have taken all steps, whatever this one did
        mechanism = mechanism.replace(num_steps=max(mechanism.num_steps, plan.mechanism.num_steps))
    spent = epsilon(mechanism, plan.delta, privacy.accountant, plan.selection)
    found, by_rdp, by_pld = finite(spent.epsilon), finite(spent.epsilon_rdp), finite(spent.epsilon_pld)
    real, hypothetical = (
        ((found, by_rdp, by_pld), (None,) * 3) if plan.private else ((None,) * 3, (found, by_rdp, by_pld))
    )
    person, image, of_person = None, None, None
    draws_people = privacy.person_sampling == "persons"
    if draws_people:
        person, of_person = found, attacker_claims(mechanism) if plan.private else None
    elif privacy.max_images_per_person is not None and plan.selection is None:
        of_all_images = mechanism.replace(images_per_unit=privacy.max_images_per_person)
        person = finite(epsilon(of_all_images, plan.delta).epsilon)
        of_person = attacker_claims(of_all_images) if plan.private else None
    if privacy.unit == "person" and not draws_people:
        image = finite(epsilon(mechanism.replace(images_per_unit=1), plan.delta).epsilon)
    covers_the_search = plan.selection is not None or privacy.search_data == "public"
    selection = plan.selection
    return Claims(
        private=plan.private,
        why_not_private=plan.why_not_private,
        epsilon=real[0],
        epsilon_rdp=real[1],
        epsilon_pld=real[2],
        epsilon_if_private=hypothetical[0],
        epsilon_rdp_if_private=hypothetical[1],
        epsilon_pld_if_private=hypothetical[2],
        delta=plan.delta,
        accountant=spent.accountant,
        accountant_note=spent.note,
        relation=RELATION if privacy.unit == "image" else RELATION_OF_PERSONS,
        unit=unit_in_words(privacy.max_images_per_person if privacy.unit == "person" else None),
        drawn="people" if draws_people else "images",
        selected_from=None if selection is None else selection.mean,
        selection_shape=None if selection is None else selection.shape,
        score_noise=None if selection is None else selection.score_noise,
        epsilon_search_inclusive=real[0] if covers_the_search else None,
        epsilon_image=image if plan.private else None,
        epsilon_image_if_private=None if plan.private else image,
        max_images_per_person=privacy.max_images_per_person,
        epsilon_person=person if plan.private else None,
        epsilon_person_if_private=None if plan.private else person,
        person_groups=_groups(plan) if privacy.max_images_per_person is not None else None,
        attacker=attacker_claims(mechanism, plan.selection) if plan.private else None,
        attacker_person=of_person,
    )


def claims_of(mechanism: Mechanism, delta: float, accountant: Accountant = "pld") -> Claims:
    """Every epsilon of a mechanism that stands for itself, without a plan; its noise is taken to be secret.

    Raises:
        InputError: If no epsilon is known for it, it is infinite, or delta is too small for noise that is drawn.
    """
    from sfumato.accounting.accountants import epsilon

    refuse_beyond_reach(mechanism, delta)
    spent = epsilon(mechanism, delta, accountant)
    if finite(spent.epsilon) is None:
        raise InputError("without noise there is no epsilon to certify. Give the mechanism a noise multiplier.")
    of_persons = mechanism.images_per_unit > 1
    return Claims(
        private=True,
        why_not_private=None,
        epsilon=spent.epsilon,
        epsilon_rdp=spent.epsilon_rdp,
        epsilon_pld=spent.epsilon_pld,
        delta=delta,
        accountant=spent.accountant,
        accountant_note=spent.note,
        relation=RELATION_OF_PERSONS if of_persons else RELATION,
        unit=unit_in_words(mechanism.images_per_unit if of_persons else None),
        max_images_per_person=mechanism.images_per_unit if of_persons else None,
        epsilon_person=spent.epsilon if of_persons else None,
        person_groups="declared, not checked" if of_persons else None,
        attacker=attacker_claims(mechanism),
    )


def unit_in_words(images_per_person: int | None) -> str:
    """Whom an epsilon is for; None: not for persons."""
    if images_per_person is None:
        return "one image"
    return f"one person with at most {images_per_person} image{'s' if images_per_person > 1 else ''}"


def attacker_claims(mechanism: Mechanism, selection: "Selection | None" = None) -> AttackerClaims:
    """What an attacker can tell, at most, as it is written down."""
    from sfumato.accounting.attacker import attacker

    bound = attacker(mechanism, selection)
    return AttackerClaims(
        advantage=bound.advantage,
        accuracy=bound.accuracy,
        true_positives_at_1_percent=bound.true_positives[0],
        true_positives_at_0_1_percent=bound.true_positives[1],
        candidates=bound.candidates,
        singled_out=bound.singled_out,
        source=bound.source,
    )


def _groups(plan: "Plan") -> str:
    if plan.recipe.data.group_by is None:
        return "declared, not checked"
    return "as data.group_by states; of each group's training images no more than the limit were used"
