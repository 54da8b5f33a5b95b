"""A certificate in plain words: what epsilon and delta mean for a person, and what they do not."""

from sfumato.accounting import formats
from sfumato.accounting.attacker import Attacker
from sfumato.planning.claims import Guarantee
from sfumato.run_folder.record import Certificate, PublicInputs

HARDLY, LITTLE = 0.75, 0.99
"""How often an attacker is right: up to the first, an image can hardly be told; beyond the second, little protects it.
"""


def for_a_patient(certificate: Certificate) -> str:
    """What the run means for whoever is in its images, in words for everybody."""
    several = "" if certificate.of_persons else " If several of the images show you, it is easier to tell."
    if not certificate.holds:
        return (
            "If you are in one of the training images: this run gives you no guarantee. From what it gives away, "
            "somebody may find out whether your image was used, and even what it shows."
        )
    guess = 1.0 if certificate.attacker is None else certificate.attacker.accuracy
    told, weak = "cannot be told for certain", ""
    if guess <= HARDLY:
        told = "can hardly be told"
    elif guess > LITTLE:
        told, weak = "may well be told", " That is little protection."
    if not certificate.of_persons and certificate.attacker_person is not None:
        most = formats.count(certificate.max_images_per_person or 0)
        right = formats.per_cent_at_most(certificate.attacker_person.accuracy)
        several = f" If up to {most} images show you: at most {right}."
    what = "this model" if certificate.status == "complete" else "what this unfinished run gives away"
    yours = "images of yours were" if certificate.of_persons else "yours was"
    return (
        f"If you are in one of the training images: whether {yours} used {told} from {what}. Whoever tries is right at "
        f"most {formats.per_cent_at_most(guess)} of the time, where a coin toss is right 50 %.{weak}{several}"
    )


def verdict(certificate: Certificate) -> tuple[str, list[str]]:
    """The one thing to know first, in a few words and then in sentences: the guarantee, or that there is none."""
    if not certificate.holds:
        reason = certificate.why_not_private or "no finite epsilon can be certified for it"
        treat = "Treat the model, and everything else that the run wrote, like the training images themselves."
        texts = [f"This run gives no privacy guarantee: {reason}.", treat]
        return "Not private", texts + ([] if certificate.epsilon_if_private is None else [_if_private(certificate)])
    numbers = f"ε ≤ {formats.epsilon_text(certificate.epsilon)} at δ = {formats.delta_text(certificate.delta)}"
    num_held_out = formats.count(certificate.public_inputs.num_held_out)
    held_out = f"{num_held_out} further images were held out to measure accuracy: no guarantee is given to them."
    texts = [_person(certificate), held_out]
    if certificate.status == "running":
        texts.append("The run has not finished: these numbers already count every step that is planned.")
    return numbers, texts


def _person(guarantee: Guarantee) -> str:
    """What the guarantee means for whoever is on an image."""
    single = "person" if guarantee.of_persons else "image"
    text = (
        f"The training was randomised so that its result hardly depends on any single {single}. "
        f"{who_guesses(guarantee.attacker, of_persons=guarantee.of_persons)} That holds whatever they try and whatever "
        f"they know, all other training images included, where yes and no are equally likely."
    )
    if guarantee.of_persons:
        text += f" It holds for {guarantee.unit}, all of them together."
    elif guarantee.epsilon_person is not None and guarantee.attacker_person is not None:
        who = f"a person with up to {formats.count(guarantee.max_images_per_person or 0)} images, all of them together"
        text += f" For {who}: {who_guesses(guarantee.attacker_person, of_persons=True)}"
    return text


def who_guesses(attacker: Attacker | None, *, of_persons: bool) -> str:
    """What an attacker is right about at most, in one sentence that stands alone."""
    what = "images of one given person were" if of_persons else "one given image was"
    guess = 1.0 if attacker is None else attacker.accuracy
    weak = " In this worst case that is little protection." if guess > LITTLE else ""
    return (
        f"Someone who tries to tell whether {what} used for training is right at most "
        f"{formats.per_cent_at_most(guess)} of the time; a coin toss is right 50 % of the time.{weak}"
    )


def _if_private(guarantee: Guarantee) -> str:
    also = ""
    if guarantee.of_persons:
        also = f" for {guarantee.unit}"
    elif guarantee.epsilon_person_if_private is not None:
        also = f", and {formats.epsilon_text(guarantee.epsilon_person_if_private)} for all images of one person"
    return (
        "For comparison only: with Poisson sampling and secret noise, the same settings would have meant epsilon "
        f"{formats.epsilon_text(guarantee.epsilon_if_private)} at delta {formats.delta_text(guarantee.delta)}{also}. "
        "That is no guarantee for this run."
    )


Term = tuple[str, str, str]
"""A name, its value, and what it means."""


def terms(certificate: Certificate) -> list[Term]:
    """The certificate line by line."""
    guaranteed = _guarantee(certificate) if certificate.holds else []
    return [*guaranteed, *_mechanism(certificate), *_released(certificate)]


def _guarantee(certificate: Certificate) -> list[Term]:
    assert certificate.delta is not None and certificate.accountant is not None and certificate.unit is not None
    by_pld, by_rdp = (
        "not computed" if value is None else formats.epsilon_text(value)
        for value in (certificate.epsilon_pld, certificate.epsilon_rdp)
    )
    of_persons, groups = certificate.of_persons, f"Which images belong together: {certificate.person_groups}."
    of_epsilon = (
        f"One {'person' if of_persons else 'image'} shifts the probability of any result by a factor of at most "
        f"e^epsilon = {formats.factor_text(certificate.epsilon)}. Epsilon 1 is strong, 3 usual, 8 weak. "
        f"Accountant: {certificate.accountant.upper()}. By PLD {by_pld}, by RDP {by_rdp}; each is an upper bound. "
        f"{certificate.accountant_note or ''}"
    )
    of_delta = (
        f"What that factor does not cover: at most {formats.one_in(certificate.delta)} is added to any probability. It "
        f"should be well below one in {formats.count(certificate.num_examples)}, the number of {_drawn(certificate)}."
    )
    of_unit = "The guarantee is for each single image. It weakens for someone who is on several of them."
    if of_persons:
        of_unit = f"The guarantee is for each person, with all of these images together. {groups}"
    rows = [
        ("Epsilon", formats.epsilon_text(certificate.epsilon), of_epsilon.strip()),
        ("Delta", formats.delta_text(certificate.delta), of_delta),
        ("Unit", certificate.unit, of_unit),
    ]
    if certificate.epsilon_image is not None:
        rows.append(("Epsilon of one image", formats.epsilon_text(certificate.epsilon_image), "For one image alone."))
    elif certificate.max_images_per_person is not None and not of_persons:
        images = formats.count(certificate.max_images_per_person)
        text = f"For all of up to {images} images of one person together. {groups}"
        rows.append(("Epsilon of a person", formats.epsilon_text(certificate.epsilon_person), text))
    rows.append(("Relation", "", f"What is compared: {certificate.relation}."))
    told = {"Attacker": certificate.attacker, "Attacker, of a person": certificate.attacker_person}
    for name, attacker in list(told.items())[: 1 if of_persons else 2]:
        if attacker is not None:
            rows.append((name, f"right at most {formats.per_cent_at_most(attacker.accuracy)}", of_attacker(attacker)))
    return rows


def of_attacker(attacker: Attacker) -> str:
    """Of one who is seldom wrong, and of one who names one of many."""
    candidates = formats.count(attacker.candidates)
    return (
        "Where used and not used are equally likely. An attacker who wrongly suspects 1 % of those that were not used "
        f"recognises at most {formats.per_cent_at_most(attacker.true_positives_at_1_percent)} of those that were; one "
        f"who wrongly suspects 0.1 %, at most {formats.per_cent_at_most(attacker.true_positives_at_0_1_percent)}. "
        f"Picking the one that was used among {candidates} candidates succeeds with a chance of at most "
        f"{formats.chance_at_most(attacker.singled_out)}; a blind pick has 1 in {candidates}."
    )


def _mechanism(certificate: Certificate) -> list[Term]:
    examples, batch = formats.count(certificate.num_examples), formats.count(certificate.batch_size)
    one, of_persons = (
        ("person", " A person's is the mean over their images.") if certificate.drawn == "people" else ("image", "")
    )
    sampling = f"Batches of {batch} of {examples} training images, shuffled."
    if certificate.sampling == "poisson" and certificate.sampling_prob == 1:
        sampling = f"Each step takes all of the {examples} {_drawn(certificate)}."
    elif certificate.sampling == "poisson":
        sampling = (
            f"At each step, each of the {examples} {_drawn(certificate)} is drawn by itself with probability "
            f"{formats.quantity(certificate.sampling_prob)}; {batch} are expected."
            f"{' Which ones were drawn stays secret.' if certificate.holds else ''}"
        )
    noise = f"Standard deviation of the noise in units of what one {one} can contribute to a step."
    rows = [
        ("Sampling", certificate.sampling, sampling),
        ("Noise multiplier", formats.quantity(certificate.noise_multiplier), noise),
    ]
    if certificate.clipping_norm is not None:
        bound = f"The bound on each {one}'s gradient, which limits what it can contribute.{of_persons}"
        rows.append(("Clipping norm", formats.quantity(certificate.clipping_norm), bound))
    return rows


def _released(certificate: Certificate) -> list[Term]:
    """What is public of the images, and what left the run."""
    lost = f" {formats.count(certificate.num_lost)} of them were lost in crashes." if certificate.num_lost else ""
    steps = "Updates of the weights."
    if certificate.holds:
        steps = f"Updates that may be released in all; epsilon is that of all of them, whenever the run ends.{lost}"
    digest = f"The record of every release; SHA-256 {certificate.ledger_sha256}."
    rows = [
        ("Public inputs", "", _public(certificate.public_inputs)),
        ("Steps", formats.count(certificate.num_steps), steps),
        ("Ledger", f"{formats.count(certificate.ledger_lines)} lines", digest),
    ]
    if certificate.weights_sha256 is not None:
        digest = f"SHA-256 of names, types, shapes and values: {certificate.weights_sha256}."
        rows.append(("Weights", "model.safetensors", digest))
    return rows


def _drawn(certificate: Certificate) -> str:
    if certificate.drawn == "people":
        return "people with training images"
    canaries = certificate.public_inputs.num_canaries
    return f"training images (of them {formats.count(canaries)} canaries)" if canaries else "training images"


def _public(inputs: PublicInputs) -> str:
    shares, colours = inputs.class_proportions, "grey" if inputs.channels == 1 else "colour"
    proportions = f" the class proportions {', '.join(map(formats.quantity, shares))}," if shares is not None else ""
    return (
        f"Taken to be known to everybody, and not protected: the number of images"
        f"{'' if inputs.num_people is None else ' and of people'}, the {formats.count(len(inputs.classes))} class "
        f"names (from {inputs.classes_from}),{proportions} {inputs.image_size} x {inputs.image_size} pixels in "
        f"{colours}, the constants by which pixels are normalised, and the rule that holds images out."
    )
