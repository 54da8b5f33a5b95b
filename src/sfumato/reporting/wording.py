"""A certificate in plain words: what epsilon and delta mean for a person, and what they do not."""

import math
from typing import Any

from sfumato.reporting import formats
from sfumato.reporting.markup import Html, element
from sfumato.reporting.recorded import Recorded


def best_guess(epsilon: float, delta: float) -> float:
    """How often the best possible guess whether one image took part is right, at most.

    For even odds beforehand this is (e^epsilon + delta) / (e^epsilon + 1), half of one plus
    the membership advantage (e^epsilon - 1 + 2 delta) / (e^epsilon + 1) of De et al. 2022, Table 8.

    Example:
        >>> best_guess(0.0, 0.0), round(best_guess(3.0, 0.0), 4)
        (0.5, 0.9526)
    """
    wrong = 1 / (1 + math.exp(min(epsilon, 700.0)))
    return 1 - (1 - delta) * wrong


def verdict(run: Recorded) -> Html:
    """The one thing to know first: the guarantee, or that there is none."""
    privacy = run.privacy
    if run.is_private:
        numbers = element("p", f"ε ≤ {formats.epsilon(privacy['epsilon'])} at δ = {formats.delta(privacy['delta'])}", class_="headline")
        return element("div", numbers, _person(privacy), *_running(privacy), class_="verdict")
    reason = privacy.get("why_not_private") or "no finite epsilon can be certified for it"
    parts = [
        element("p", "Not private", class_="headline"),
        element("p", f"This run gives no privacy guarantee: {reason}."),
        element("p", "Treat the model, and everything else that the run wrote, like the training images themselves."),
    ]
    return element("div", *parts, *_if_private(privacy), class_="verdict none")


def _person(privacy: dict[str, Any]) -> Html:
    """What the guarantee means for whoever is on an image."""
    delta = privacy["delta"]
    text = (
        "The training was randomised so that its result hardly depends on any single image. Suppose someone knows every other training image, "
        "studies the finished model and has to say whether one particular image took part, where both are equally likely. A coin is right "
        f"50 % of the time. Whatever they try and whatever else they know, they are right {_at_most(privacy['epsilon'], delta)}"
    )
    person = privacy.get("epsilon_person")
    if person is not None:
        images = formats.count(privacy["max_images_per_person"])
        text += f" If they ask instead about a person with up to {images} images, all of them together, they are right {_at_most(person, delta)}"
    return element("p", text)


def _at_most(epsilon: float, delta: float) -> str:
    guess = best_guess(epsilon, delta)
    weak = " In this worst case that is little protection." if guess > 0.99 else ""
    return f"at most {formats.per_cent_at_most(guess)} of the time.{weak}"


def _running(privacy: dict[str, Any]) -> list[Html]:
    if privacy.get("status") != "running":
        return []
    return [element("p", "The run has not finished: these numbers already count every step that is planned, so what was spent so far is less.")]


def _if_private(privacy: dict[str, Any]) -> list[Html]:
    hypothetical = privacy.get("epsilon_if_private")
    if hypothetical is None:
        return []
    person = privacy.get("epsilon_person_if_private")
    also = f", and {formats.epsilon(person)} for all images of one person" if person is not None else ""
    text = (
        "For comparison only: with Poisson sampling and secret noise, the same settings would have meant epsilon "
        f"{formats.epsilon(hypothetical)} at delta {formats.delta(privacy['delta'])}{also}. That is no guarantee for this run."
    )
    return [element("p", text, class_="hypothetical")]


def terms(run: Recorded) -> list[tuple[str, str, str]]:
    """The certificate line by line: (name, value, what it means)."""
    privacy = run.privacy
    return [*(_guarantee(privacy) if run.is_private else []), *_mechanism(privacy, run.is_private)]


def _guarantee(privacy: dict[str, Any]) -> list[tuple[str, str, str]]:
    delta = privacy["delta"]
    by_pld = "not computed" if privacy["epsilon_pld"] is None else formats.epsilon(privacy["epsilon_pld"])
    how = f"Accountant: {privacy['accountant'].upper()}. By PLD {by_pld}, by RDP {formats.epsilon(privacy['epsilon_rdp'])}; each is an upper bound."
    if privacy.get("accountant_note"):
        how += f" {privacy['accountant_note']}"
    rows = [
        (
            "Epsilon",
            formats.epsilon(privacy["epsilon"]),
            f"How far one image can shift the probability of any result: by a factor of at most e to the power of epsilon. Smaller is safer. {how}",
        ),
        (
            "Delta",
            formats.delta(delta),
            f"What the factor does not cover: at most {formats.one_in(delta)} may be added to any probability. It should be well below one in "
            f"{formats.count(privacy['num_examples'])}, the number of training images.",
        ),
        ("Unit", privacy["unit"], "The guarantee is for each single image. It weakens for someone who is on several of them."),
    ]
    if privacy.get("epsilon_person") is not None or privacy.get("max_images_per_person") is not None:
        images = formats.count(privacy["max_images_per_person"])
        groups = f"Which images belong together: {privacy['person_groups']}."
        rows.append(
            (
                "Epsilon of a person",
                formats.epsilon(privacy.get("epsilon_person")),
                f"For all of up to {images} images of one person together. {groups}",
            )
        )
    rows.append(("Relation", "", f"What is compared: {privacy['relation']}."))
    return rows


def _mechanism(privacy: dict[str, Any], is_private: bool) -> list[tuple[str, str, str]]:
    examples = formats.count(privacy["num_examples"])
    if privacy["sampling"] == "poisson":
        sampling = (
            f"At each step, each of the {examples} training images is drawn by itself with probability {formats.quantity(privacy['sampling_prob'])}; "
            f"{formats.count(privacy['batch_size'])} are expected. " + ("Which ones were drawn stays secret." if is_private else "")
        )
    else:
        sampling = (
            f"Batches of {formats.count(privacy['batch_size'])} of the {examples} training images in shuffled order. "
            "No epsilon of Poisson sampling holds for them."
        )
    rows = [
        ("Sampling", privacy["sampling"], sampling.strip()),
        (
            "Noise multiplier",
            formats.quantity(privacy["noise_multiplier"]),
            "Standard deviation of the noise in units of what one image can contribute to a step.",
        ),
    ]
    if privacy["clipping_norm"] is not None:
        rows.append(
            ("Clipping norm", formats.quantity(privacy["clipping_norm"]), "The bound on each image's gradient, which limits what it can contribute.")
        )
    if "public_inputs" in privacy:
        rows.append(("Public inputs", "", _public(privacy["public_inputs"])))
    rows.append(("Steps", formats.count(privacy["num_steps"]), "Updates of the weights that are counted."))
    rows.append(
        ("Ledger", f"{formats.count(privacy['ledger_lines'])} lines", f"The record of every update; its last hash is {privacy['ledger_head']}.")
    )
    return rows


def _public(inputs: dict[str, Any]) -> str:
    shares = inputs["class_proportions"]
    proportions = "no class proportions" if shares is None else f"class proportions {', '.join(formats.quantity(share) for share in shares)}"
    return (
        f"Taken to be known to everybody, and not protected: the number of images, the {formats.count(len(inputs['classes']))} class names "
        f"(from {inputs['classes_from']}), {proportions}, {inputs['image_size']} x {inputs['image_size']} pixels, {inputs['channels']} channel(s), "
        "the constants by which pixels are normalised, and the rule that holds images out."
    )
