"""What an attack on the run showed: a section of its report, where there was one."""

from typing import Any

from sfumato.accounting.rounding import lower_epsilon_text
from sfumato.reporting import formats
from sfumato.reporting.markup import Html, element
from sfumato.reporting.plots import FIRST, SECOND, drawn
from sfumato.run_folder.audited import Histogram, OneRunClaim
from sfumato.run_folder.record import Recorded


def audit_section(run: Recorded) -> list[Html]:
    """The section; nothing where the run was not attacked."""
    claim, guarantee = run.certificate.audit, run.certificate.guarantee
    if claim is None or guarantee is None:
        return []
    shown, claimed = lower_epsilon_text(claim.epsilon_lower_bound), formats.epsilon_text(guarantee.epsilon)
    tiles = [_tile(shown, "shown: epsilon is at least that"), _tile(claimed, "claimed: epsilon is at most that")]
    figure = drawn(
        lambda figure: _draw(figure, claim.scores), 260, "Scores of the canaries", _described(claim), "canaries"
    )
    caption = (
        "Minus the loss of each canary under the released weights. The further the two groups are apart, the more an "
        "attacker sees."
    )
    return [
        element(
            "section",
            element("h2", "What an attack showed"),
            element("div", *tiles, class_="tiles"),
            *([_refuted(claimed)] if claim.violated else []),
            element("p", _how(claim)),
            element("figure", figure, element("figcaption", caption)),
        )
    ]


def _refuted(claimed: str) -> Html:
    return element(
        "p",
        f"The claim of epsilon {claimed} is refuted: the certificate is wrong, or the code is, unless this is the rare "
        "case that the confidence leaves.",
        class_="remark",
    )


def _how(claim: OneRunClaim) -> str:
    return (
        f"{formats.count(claim.num_canaries)} canaries, made-up images of noise with labels at random, stood among the "
        f"training images; a fair coin decided for each whether it took part. From the released weights alone the "
        f"attacker guessed {formats.count(claim.num_guesses)} of these coins, and {formats.count(claim.num_right)} "
        f"guesses were right. At confidence {formats.per_cent(claim.confidence)} and delta "
        f"{formats.delta_text(claim.delta)} this is what they show of epsilon ({claim.bound}). An attacker who is "
        f"never wrong would have shown {lower_epsilon_text(claim.perfect)}. An attack can refute a claim, never "
        "prove one. This section depends on the released weights, on canaries that everybody can make and on their "
        "coins; on the training images in no other way."
    )


def _described(claim: OneRunClaim) -> str:
    inside, outside = sum(claim.scores.members), sum(claim.scores.non_members)
    return (
        f"Two histograms: of {formats.count(inside)} canaries that took part and {formats.count(outside)} that did not."
    )


def _draw(figure: Any, scores: Histogram) -> None:
    axes = figure.subplots()
    for counts, colour, label in (
        (scores.non_members, SECOND, "took no part"),
        (scores.members, FIRST, "took part"),
    ):
        axes.stairs([count / max(1, sum(counts)) for count in counts], scores.edges, color=colour, label=label)
    axes.set_xlabel("score")
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.set_title("Share of each group")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, borderaxespad=0.0, handlelength=1.6)


def _tile(value: str, name: str) -> Html:
    return element(
        "p", element("span", value, class_="number"), " ", element("span", name, class_="label"), class_="tile"
    )
