"""What an attack on a run showed, as its certificate states it beside the claim."""

from typing import Annotated

from pydantic import Field

from sfumato.json_record import Record


class Histogram(Record):
    """How many canaries have which score.

    Attributes:
        edges: Between bins, ascending: one more than there are bins.
        members: Of the canaries that took part, in each bin.
        non_members: Of those that took none.
    """

    edges: Annotated[list[float], Field(min_length=2)]
    members: list[int]
    non_members: list[int]


class OneRunClaim(Record):
    """What `sfumato audit one-run` showed: it depends on the released model, on canaries that everybody can make
    and on their coins, hence on no training image but through what the certificate covers.

    Attributes:
        epsilon_lower_bound: Epsilon is at least that, with this confidence; 0: nothing was shown.
        bound: By whom.
        confidence: Of the bound.
        delta: At which epsilon is bounded.
        num_canaries: m.
        num_guesses: Canaries that the attacker was sure enough of.
        num_right: Guesses that were right.
        perfect: What an attacker who is never wrong would have shown.
        violated: Whether the claimed epsilon is refuted.
        scores: Of all canaries.
    """

    epsilon_lower_bound: float
    bound: str
    confidence: float
    delta: float
    num_canaries: int
    num_guesses: int
    num_right: int
    perfect: float
    violated: bool
    scores: Histogram
