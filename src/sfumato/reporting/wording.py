"""A certificate in plain words: what epsilon and delta mean for a person, and what they do not."""

from sfumato.planning.claims import AttackerClaims, Guarantee
from sfumato.reporting import formats
from sfumato.reporting.html import Html, element, paragraph
from sfumato.run_folder.record import Certificate, PublicInputs, Recorded


def verdict(run: Recorded) -> Html:
    """The one thing to know first: the guarantee, or that there is none."""
    certificate = run.certificate
    guarantee = certificate.guarantee
    if guarantee is None:
        reason = certificate.why_not_private or "no finite epsilon can be certified for it"
        treat = "Treat the model, and everything else that the run wrote, like the training images themselves."
        parts = [paragraph("Not private", "headline"), paragraph(f"This run gives no privacy guarantee: {reason}.")]
        parts.append(paragraph(treat))
        if certificate.hypothetical is not None:
            parts.append(paragraph(_if_private(certificate.hypothetical), "hypothetical"))
        return element("div", *parts, class_="verdict none")
    numbers = f"ε ≤ {formats.epsilon_text(guarantee.epsilon)} at δ = {formats.delta_text(guarantee.delta)}"
    held_out = (
        f"{formats.count(certificate.public_inputs.num_held_out)} further images were held out to measure accuracy: no "
        "guarantee is given to them."
    )
    parts = [paragraph(numbers, "headline"), paragraph(_person(guarantee)), paragraph(held_out)]
    if certificate.status == "running":
        counted = "The run has not finished: these numbers already count every step that is planned, so what was spent "
        parts.append(paragraph(counted + "so far is less."))
    return element("div", *parts, class_="verdict")


def _person(guarantee: Guarantee) -> str:
    """What the guarantee means for whoever is on an image."""
    of_persons = guarantee.of_persons
    single, every_other, one = (
        ("person among those trained on", "image of everybody else", "person")
        if of_persons
        else ("image among those trained on", "other training image", "particular image")
    )
    text = (
        f"The training was randomised so that its result hardly depends on any single {single}. "
        f"Suppose someone knows every {every_other}, studies the finished model and has to "
        f"say whether one {one} took part, where both are equally likely. A coin is "
        "right 50 % of the time. Whatever they try and whatever else they know, they are right "
        f"{_at_most(guarantee.attacker)}"
    )
    epsilon, images = guarantee.person or (None, 0)
    if of_persons:
        text += f" This holds for {guarantee.unit}, all of them together."
    elif epsilon is not None and guarantee.attacker_person is not None:
        who = f"a person with up to {formats.count(images)} images, all of them together"
        text += f" If they ask instead about {who}, they are right {_at_most(guarantee.attacker_person)}"
    return text


def _at_most(attacker: AttackerClaims | None) -> str:
    guess = 1.0 if attacker is None else attacker.accuracy
    weak = " In this worst case that is little protection." if guess > 0.99 else ""
    return f"at most {formats.per_cent_at_most(guess)} of the time.{weak}"


def _if_private(hypothetical: Guarantee) -> str:
    also = ""
    if hypothetical.of_persons:
        also = f" for {hypothetical.unit}"
    elif hypothetical.person and hypothetical.person[0] is not None:
        also = f", and {formats.epsilon_text(hypothetical.person[0])} for all images of one person"
    return (
        "For comparison only: with Poisson sampling and secret noise, the same settings would have meant epsilon "
        f"{formats.epsilon_text(hypothetical.epsilon)} at delta {formats.delta_text(hypothetical.delta)}{also}. That "
        "is no guarantee for this run."
    )


Term = tuple[str, str, str]
"""A name, its value, and what it means."""


def terms(run: Recorded) -> list[Term]:
    """The certificate line by line."""
    certificate = run.certificate
    guarantee = certificate.guarantee
    return [*(_guarantee(guarantee, certificate) if guarantee else []), *_mechanism(certificate, guarantee is not None)]


def _guarantee(guarantee: Guarantee, certificate: Certificate) -> list[Term]:
    by_pld, by_rdp = (
        "not computed" if value is None else formats.epsilon_text(value)
        for value in (certificate.epsilon_pld, certificate.epsilon_rdp)
    )
    of_persons = guarantee.of_persons
    single, examples = "person" if of_persons else "image", formats.count(certificate.num_examples)
    groups = f"Which images belong together: {certificate.person_groups}."
    of_epsilon = (
        f"How far one {single} can shift the probability of any result: by a factor of at most e to the power of "
        "epsilon. Smaller is safer: 1 is strong, 3 usual, 8 weak. "
        f"Accountant: {guarantee.accountant.upper()}. By PLD {by_pld}, by RDP {by_rdp}; each is an upper bound. "
        f"{certificate.accountant_note or ''}"
    )
    of_delta = (
        f"What that factor does not cover: at most {formats.one_in(guarantee.delta)} may be added to any probability. "
        f"It should be well below one in {examples}, the number of {_drawn(certificate)}."
    )
    of_unit = "The guarantee is for each single image. It weakens for someone who is on several of them."
    if of_persons:
        of_unit = f"The guarantee is for each person, with all of these images together. {groups}"
    rows = [
        ("Epsilon", formats.epsilon_text(guarantee.epsilon), of_epsilon.strip()),
        ("Delta", formats.delta_text(guarantee.delta), of_delta),
        ("Unit", guarantee.unit, of_unit),
    ]
    if guarantee.image is not None:
        rows.append(("Epsilon of one image", formats.epsilon_text(guarantee.image), "For one image alone."))
    elif guarantee.person is not None and not of_persons:
        epsilon, images = guarantee.person
        text = f"For all of up to {formats.count(images)} images of one person together. {groups}"
        rows.append(("Epsilon of a person", formats.epsilon_text(epsilon), text))
    rows.append(("Relation", "", f"What is compared: {certificate.relation}."))
    told = {"Attacker": guarantee.attacker}
    if not of_persons:
        told["Attacker, of a person"] = guarantee.attacker_person
    for name, attacker in told.items():
        if attacker is not None:
            rows.append((name, f"right at most {formats.per_cent_at_most(attacker.accuracy)}", _of_attacker(attacker)))
    return rows


def _of_attacker(attacker: AttackerClaims) -> str:
    how = (
        "From the mechanism's own trade-off between the two errors (PLD)."
        if attacker.source == "pld"
        else "From several pairs of epsilon and delta: the mechanism's own trade-off is not computed here."
    )
    return (
        "Of guesses at even odds. Who accepts false alarms for 1 % of those that took no part recognises at most "
        f"{formats.per_cent_at_most(attacker.true_positives_at_1_percent)} of those that did; with 0.1 %, at most "
        f"{formats.per_cent_at_most(attacker.true_positives_at_0_1_percent)}. {singled_out(attacker)} {how}"
    )


def singled_out(attacker: AttackerClaims) -> str:
    """The chance of naming the one of many that took part, in words."""
    candidates = formats.count(attacker.candidates)
    return (
        f"Who has {candidates} candidates, of which one took part, names that one with a chance of at most "
        f"{formats.chance_at_most(attacker.singled_out)}; a blind guess has 1 in {candidates}."
    )


def _mechanism(certificate: Certificate, is_private: bool) -> list[Term]:
    examples, batch = formats.count(certificate.num_examples), formats.count(certificate.batch_size)
    one = "person" if certificate.drawn == "people" else "image"
    sampling = (
        f"Batches of {batch} of the {examples} training images in shuffled order. No epsilon of Poisson sampling holds "
        "for them."
    )
    if certificate.sampling == "poisson":
        secret = " Which ones were drawn stays secret." if is_private else ""
        sampling = (
            f"At each step, each of the {examples} {_drawn(certificate)} is drawn by itself with probability "
            f"{formats.quantity(certificate.sampling_prob)}; {batch} are expected.{secret}"
        )
    noise = f"Standard deviation of the noise in units of what one {one} can contribute to a step."
    rows = [
        ("Sampling", certificate.sampling, sampling),
        ("Noise multiplier", formats.quantity(certificate.noise_multiplier), noise),
    ]
    if certificate.clipping_norm is not None:
        mean = " A person's is the mean over their images." if one == "person" else ""
        bound = (
            f"The bound on each {one}'s gradient, or on the length of its features where the classifier is solved for, "
            f"which limits what it can contribute.{mean}"
        )
        rows.append(("Clipping norm", formats.quantity(certificate.clipping_norm), bound))
    if certificate.first_release_noise is not None:
        released = (
            f"Before the steps, the mean or the second moments (DP-FC) of the features of all {examples} images were "
            "released once; the noise is in units of what one image can contribute. Epsilon covers both."
        )
        rows.append(("Noise of the first release", formats.quantity(certificate.first_release_noise), released))
    lost = f" {formats.count(certificate.num_lost)} of them were lost in crashes." if certificate.num_lost else ""
    steps = "Updates of the weights."
    if is_private:
        steps = f"Updates that may be released in all; epsilon is that of all of them, whenever the run ends.{lost}"
    digest = f"The record of every release; SHA-256 {certificate.ledger_sha256}."
    rows += [
        ("Public inputs", "", _public(certificate.public_inputs)),
        ("Steps", formats.count(certificate.num_steps), steps),
        ("Ledger", f"{formats.count(certificate.ledger_lines)} lines", digest),
    ]
    if certificate.weights_sha256 is not None:
        digest = f"SHA-256 of names, types, shapes and values: {certificate.weights_sha256}."
        day = "" if certificate.finished_on is None else f" Training ended on {certificate.finished_on} (UTC)."
        rows.append(("Weights", "model.safetensors", f"{digest}{day}"))
    return rows


def _drawn(certificate: Certificate) -> str:
    if certificate.drawn == "people":
        return "people with training images"
    canaries = certificate.public_inputs.num_canaries
    return f"training images (of them {formats.count(canaries)} canaries)" if canaries else "training images"


def _public(inputs: PublicInputs) -> str:
    shares = inputs.class_proportions
    proportions = (
        "no class proportions"
        if shares is None
        else f"class proportions {', '.join(formats.quantity(share) for share in shares)}"
    )
    return (
        f"Taken to be known to everybody, and not protected: the number of images"
        f"{' and of people' if inputs.num_people is not None else ''}, the "
        f"{formats.count(len(inputs.classes))} class names (from {inputs.classes_from}), "
        f"{proportions}, {inputs.image_size} x {inputs.image_size} pixels, {inputs.channels} "
        "channel(s), the constants by which pixels are normalised, and the rule that holds "
        "images out."
    )
