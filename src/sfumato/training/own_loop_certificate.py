"""What the releases of somebody's own loop cost, and what the certificate leaves to its author's word."""

import dataclasses
from typing import Literal

from sfumato.accounting.mechanism import Accountant
from sfumato.accounting.rounding import epsilon_text
from sfumato.planning.claims import claims_of
from sfumato.run_folder.certificate import OTHER_RUNS, PERSONS, RUNNING_TIME, SEVERAL_IMAGES, UNSEARCHED, counted
from sfumato.run_folder.entries import spent_mechanism
from sfumato.run_folder.ledger import Ledger
from sfumato.run_folder.record import LoopCertificate

OF_THE_LOOP = (
    "what the loop did: that each release was the sum over the sample that was drawn for it, each image clipped alone "
    "to the stated sensitivity, which was chosen without looking at the images, that nothing else of them left it, and "
    "that nobody put an older copy of its folder, of a file of it or of its process back or went on in two copies, and "
    "that the folder's locks hold for all that reach it (on some network file systems they do not), is its author's "
    "word"
)
STOPPED = (
    "a number of updates that was chosen by samples or by what earlier updates released: the epsilon stated is that of "
    "a number fixed before"
)
BEGUN_AGAIN = (
    "how often the loop was begun again, and before which update: its ledger shows that; and folders that were left or "
    "deleted after a sample was seen, to begin in a new one: that chooses among samples, whoever or whatever does it"
)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a loop's author states beside the mechanism."""

    clipping_norm: float
    delta: float
    accountant: Accountant


def loop_certificate(
    ledger: Ledger, num_steps: int, terms: Terms, *, planned: int, status: Literal["running", "complete"]
) -> LoopCertificate:
    """Of the mechanism that the ledger's first line states.

    Args:
        num_steps: How many updates are counted.
        planned: Updates, those of sessions before included.
    """
    mechanism = spent_mechanism(ledger.lines).replace(num_steps=num_steps)
    stopped = STOPPED
    if mechanism.num_steps < planned:
        of_all = claims_of(mechanism.replace(num_steps=planned), terms.delta, terms.accountant)
        stopped += f"; {planned} were planned, whose epsilon is {epsilon_text(of_all.epsilon)}"
    return LoopCertificate(
        **dict(claims_of(mechanism, terms.delta, terms.accountant)),
        status=status,
        **counted(mechanism, ledger),
        clipping_norm=terms.clipping_norm,
        not_covered=[
            OF_THE_LOOP,
            stopped,
            BEGUN_AGAIN,
            UNSEARCHED,
            SEVERAL_IMAGES if mechanism.images_per_unit == 1 else PERSONS,
            OTHER_RUNS,
            RUNNING_TIME,
        ],
    )
