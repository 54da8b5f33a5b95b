"""What an audit found, as types: what ``--json`` prints is made from them."""

from typing import Literal

from sfumato.json_record import Record
from sfumato.run_folder.record import Histogram

BoundName = Literal["clopper-pearson", "gaussian", "trade-off"]


class Bound(Record):
    """One lower bound on epsilon.

    Attributes:
        epsilon: At least 0; None where the rates leave every epsilon possible (no rate above delta).
        assumption: What must hold besides that the games are independent; "none" for the first.
        threshold: From which score on the attacker says "took part"; chosen on other games.
        false_positives: Of `num_non_members` games that the bound used.
        true_positives: Of `num_members` games that the bound used.
        false_positive_rate: Upper end of its interval.
        true_positive_rate: Lower end of its interval; both together hold with the confidence stated.
    """

    name: BoundName
    epsilon: float | None
    assumption: str
    threshold: float
    false_positives: int
    true_positives: int
    num_non_members: int
    num_members: int
    false_positive_rate: float
    true_positive_rate: float


class GuessPower(Record):
    """What so many canaries in one run could have shown, known before it.

    Attributes:
        perfect: The bound of an attacker who is never wrong.
        tight: The bound of the best attack on a Gaussian mechanism that spends exactly the claimed
            epsilon, if each canary were alone; None without a claim.
        games_needed: So many canaries with which an attacker who is never wrong shows the claimed epsilon. None
            without a claim, or where none were found up to 10^7.
    """

    perfect: float
    tight: float | None
    games_needed: int | None


class Power(GuessPower):
    """What so many games could have shown, known before any of them was played.

    Attributes:
        perfect: The Clopper-Pearson bound of an attack that is never wrong.
        tight: The Clopper-Pearson bound of the best attack on a Gaussian mechanism that spends exactly
            the claimed epsilon; None without a claim. 0 where even that attack shows nothing.
        tight_gaussian: The Gaussian bound of the same attack.
        games_needed: Games, both sides and those for the threshold included, from which on an attack
            that is never wrong shows the claimed epsilon, if half of them are on each side: up to rounding the fewest.
            Of sides that are unlike, the smaller one decides. None without a claim, or where no number up to 10^15 is
            enough.
    """

    tight_gaussian: float | None


class Shown(Record):
    """What every audit ends with.

    Attributes:
        epsilon_lower_bound: 0 where nothing was shown; it assumes nothing of the mechanism.
        confidence: Of each bound by itself.
        nominal_epsilon: What is claimed; None where nothing is.
        violated: Whether the games refute the claim. None without a claim.
        auc: Area under the curve, over all games.
        advantage: True positives less false ones, at a threshold that these games did not choose.
        advantage_upper_bound: Of the claimed (epsilon, delta).
    """

    epsilon_lower_bound: float
    confidence: float
    nominal_epsilon: float | None
    delta: float
    violated: bool | None
    num_games: int
    auc: float
    advantage: float
    advantage_upper_bound: float | None


class AuditResult(Shown):
    """What an audit of independent games ends with.

    Attributes:
        audit: Which one.
        bounds: Each holds with `confidence` by itself. `epsilon_lower_bound` is Clopper-Pearson's; the claim is
            `violated` where that or the `trade-off` bound is above the claimed epsilon. `num_games` are all, those for
            the threshold included.
        split_seed: Which games chose thresholds follows from it.
    """

    audit: Literal["bounds", "canary", "membership"]
    bounds: list[Bound]
    power: Power
    split_seed: int


class GuessBound(Record):
    """A lower bound on epsilon from guesses of coins.

    Attributes:
        epsilon: At least 0.
        assumption: What must hold besides that the coins were fair and not known: "none".
        num_guesses: Half of them for the highest scores ("took part"), half for the lowest.
        num_right: Guesses that were right: `right_high` and `right_low` together.
    """

    name: Literal["guesses"]
    epsilon: float
    assumption: str
    num_guesses: int
    num_right: int
    right_high: int
    right_low: int


class OneRunResult(Shown):
    """What an audit of one run ends with: the claim is that of the run's certificate.

    Attributes:
        bounds: One; the claim is `violated` where it is above the claimed epsilon.
        scores: Of the canaries: minus their loss under the released weights. `num_games` are all of them.
    """

    audit: Literal["one-run"]
    bounds: list[GuessBound]
    power: GuessPower
    scores: Histogram


class CanaryResult(AuditResult):
    """What a canary audit ends with: the claim is that of the mechanism that was run.

    Attributes:
        target_epsilon: What the noise was calibrated to.
        num_runs: Each with fresh randomness.
        games_per_run: Canaries of a run: each is one game.
    """

    target_epsilon: float
    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    num_runs: int
    games_per_run: int
    seconds: float


class Winner(Record):
    """What phase I of a membership audit chose.

    Attributes:
        target: z: a blank image, noise, or a digit with the label of another.
        distance: Total variation between the Gaussians that fit the losses on z; None where models were
            too few for a choice.
    """

    target: Literal["blank", "noise", "7 as 8", "6 as 7", "0 as 1"]
    learning_rate: float
    clipping_norm: float
    num_steps: int
    distance: float | None


class MembershipResult(AuditResult):
    """What a membership audit ends with: the claim is that of the mechanism that was run.

    Attributes:
        target_epsilon: What the noise was calibrated to.
        num_examples: Without z.
        fixed_batches: Whether all models had the same batches. The claim is then without sampling.
        augmult: K, views of each image; 0: none.
        num_claimed_steps: Updates that the claim composes: all, or with fixed batches those with z.
        num_models: On each side, in phase II.
        num_choosing_models: On both sides together, in phase I.
        seconds: Of this call; what an earlier one trained is not in it.
        models_per_second: That this process trained in phase II; None where all were kept from before.
    """

    target_epsilon: float
    num_examples: int
    fixed_batches: bool
    augmult: int
    batch_size: int
    noise_multiplier: float
    num_claimed_steps: int
    winner: Winner
    num_models: int
    num_choosing_models: int
    seconds: float
    models_per_second: float | None
