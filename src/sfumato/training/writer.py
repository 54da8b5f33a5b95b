"""What the first rank writes into the run folder while a model trains, and once it is done."""

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any, Literal

import torch

from sfumato import __version__
from sfumato.accounting.accountants import EpsilonCurve
from sfumato.data.examples import Dataset
from sfumato.evaluation.augtest import WithViews
from sfumato.planning.claims import claims
from sfumato.planning.resolve import Plan
from sfumato.run_folder import ledger, record
from sfumato.run_folder.certificate import certificate, counted, public_inputs, repeated
from sfumato.run_folder.launch import Launch
from sfumato.run_folder.record import Certificate, Metrics, PrivateMetrics, Result, ResultClaims
from sfumato.training.learner import Learner
from sfumato.training.logs import Logs
from sfumato.training.outcome import HeldOutScores, save_weights


class Writer:
    """Of one start. Before each file it looks whether another start took the folder over: then it writes nothing.

    Args:
        plan, dataset, learner: Of the run.
        started: Its folder and ledger.

    Attributes:
        epsilon_at: Epsilon after so many releases; of a run that was selected from several, that of the whole plan.

    Raises:
        MachineError: By every method, if another start took the folder over, or a file cannot be written.
    """

    epsilon_at: Callable[[int], float | None]

    def __init__(self, plan: Plan, dataset: Dataset, learner: Learner, started: Launch) -> None:
        self.plan, self.dataset, self.learner, self.started = plan, dataset, learner, started
        self.folder, self.claims = started.folder, claims(plan, plan.mechanism)
        if plan.selection is not None or not plan.private:
            self.epsilon_at = lambda release: self.claims.epsilon
        else:
            self.epsilon_at = EpsilonCurve(plan.mechanism, plan.delta, plan.recipe.budget.accountant).at
        self.logs = Logs(self.folder, plan.recipe.run)

    def go_on_after(self, release: int) -> None:
        """Takes out what earlier starts wrote of later releases."""
        self.started.refuse_other()
        self.logs.go_on_after(release)

    def is_due(self) -> bool:
        """Whether a checkpoint is: `Launch.is_due`."""
        return self.started.is_due(self.plan.recipe.training.checkpoint_every)

    def look(self, release: int, scores: HeldOutScores) -> None:
        """What held-out images say."""
        accuracies = {"accuracy": scores.averaged.accuracy, "accuracy_last": scores.accuracy_last}
        self.note(Metrics(step=release, epsilon=self.epsilon_at(release), **accuracies))

    def note(self, line: Metrics | PrivateMetrics) -> None:
        """What anybody may read, or the owner."""
        self.started.refuse_other()
        self.logs.log(line)

    def checkpoint(self, state: dict[str, Any], step: int, seconds: float, *, waits: bool) -> None:
        """Of the model's update ``step``; arguments are those of `Launch.save`."""
        self.started.save(state, step, {"seconds": seconds, "speed": self.learner.speed}, waits=waits)
        self.certify(step)

    def certify(self, step: int) -> None:
        """Of a run that goes on."""
        claim = self._certificate("running", step)  # which takes a while
        self.started.refuse_other()
        record.write(self.folder / record.CERTIFICATE_FILE, claim)

    def _certificate(self, status: Literal["running", "complete"], step: int) -> Certificate:
        public = public_inputs(self.plan, self.dataset, self.learner.network.fitted)
        lines, path = self.started.ledger.lines, self.started.ledger.path
        so_far = None if self.plan.selection else self.epsilon_at(lines.num_releases)
        counts = counted(lines, step, so_far, ledger.sha256_of(path)) | {"budget": self.started.reserved}
        return certificate(self.plan, self.claims, status, public, counts)

    def complete(
        self, step: int, seconds: float, scores: HeldOutScores, with_views: WithViews, weights: dict[str, torch.Tensor]
    ) -> Result:
        """Writes weights, certificate and result, in this order. When and how fast a run ended that was selected from
        several would tell which of them it was.
        """
        self.started.settle()
        is_selected = self.plan.selection is not None
        claim, path = self._certificate("complete", step), self.folder / record.WEIGHTS_FILE
        self.started.refuse_other()
        sha256 = save_weights(path, weights, self.plan, self.learner, claim, scores.temperature)
        day = None if is_selected else datetime.datetime.now(datetime.UTC).date().isoformat()
        made = {"weights_sha256": sha256, "finished_on": day, "software": f"Sfumato {__version__}"}
        claim = claim.model_copy(update=made)
        self.started.refuse_other()
        record.write(self.folder / record.CERTIFICATE_FILE, claim)
        averaged, held_out = scores.averaged, self.dataset.held_out_name
        accuracies = {"accuracy_last": scores.accuracy_last, **dataclasses.asdict(averaged)}
        tested = ("accuracy", "accuracy_last", "accuracy_top5") if held_out == "test" else ()
        rate = self.plan.mechanism.batch_size * max(step, 1) / max(seconds, 1e-9)
        found = Result(
            **dict(repeated(ResultClaims, claim)),
            run=str(self.folder),
            held_out=held_out,
            **accuracies,
            **{f"test_{name}": accuracies[name] for name in tested},
            accuracy_interval=scores.interval,
            **dataclasses.asdict(with_views),
            num_parameters=self.learner.num_parameters,
            images_per_second=None if is_selected else rate,
            seconds=None if is_selected else seconds,
        )
        self.started.refuse_other()
        record.write(self.folder / record.RESULT_FILE, found)
        self.started.checkpoints.remove_room()
        return found

    def close(self) -> None:
        """Of the logs."""
        self.logs.close()
