"""The loop over steps, and what a run writes before, during and after it."""

import dataclasses
import datetime
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from sfumato.collector import collecting_rarely, collecting_usually
from sfumato.data.examples import Dataset
from sfumato.errors import InputError
from sfumato.json_record import finite
from sfumato.models.weights import Weights, read_weights
from sfumato.planning.resolve import Plan
from sfumato.run_folder import coins, files, key_file, record
from sfumato.run_folder import session as sessions
from sfumato.run_folder.certificate import certificate, finished, public_inputs, released
from sfumato.run_folder.checkpoint import Checkpoint
from sfumato.run_folder.environment import describe, pick_device
from sfumato.run_folder.record import Metrics, PrivateMetrics, PublicInputs, RecordLines, Result
from sfumato.run_folder.verification import verify_finished
from sfumato.training.allocator import give_freed_memory_back
from sfumato.training.budget import Budget
from sfumato.training.draws import Draws, SumChanged
from sfumato.training.held_out import (
    HeldOutScores,
    accuracy_on_training_images,
    held_out_scores,
    scores_with_views,
    warning_of_chance,
)
from sfumato.training.interrupt import Interrupted, watch_for_interrupts
from sfumato.training.learner import Learner, build_learner
from sfumato.training.logs import Logs, log_kinds
from sfumato.training.outcome import result, save_weights
from sfumato.training.step import Statistics


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a run tells whoever watches it; every call may be ignored."""

    message: Callable[[str], None] = lambda text: None
    step: Callable[["StepFacts"], None] = lambda facts: None


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """Where a run stands after a step.

    Attributes:
        epsilon: Spent so far; None where the run is not private.
        accuracy: On held-out images when they were last looked at; None before.
        evaluated: Whether that was after this step.
    """

    step: int
    num_steps: int
    epsilon: float | None
    accuracy: float | None
    images_per_second: float
    evaluated: bool


@dataclasses.dataclass(frozen=True)
class Looks:
    """What is looked at besides what the recipe asks for. Nothing that is released depends on it.

    Attributes:
        steps: After which held-out images are looked at, too.
        training_images: Whether accuracy on training images is noted for the owner (metrics_private.jsonl) after these
            steps and the last one: no guarantee covers it.
    """

    steps: frozenset[int] = frozenset()
    training_images: bool = False


@collecting_rarely()
def train(
    plan: Plan,
    dataset: Dataset,
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    trust: Collection[str] = (),
    progress: Progress = Progress(),  # noqa: B008  (immutable)
    looks: Looks = Looks(),  # noqa: B008  (immutable)
) -> Result:
    """Trains a model and writes the run folder.

    Guarantee: where ``plan.private``, everything that the run releases (model.safetensors,
    metrics.jsonl's steps and epsilons, privacy.json, ledger.jsonl) satisfies the
    (epsilon, delta) of privacy.json for the relation it states.

    Args:
        plan: From ``resolve``.
        dataset: What the plan was made for.
        folder: Of the new run, or of the one to go on with.
        device: "auto", "cpu", "cuda" ...
        resume: Go on with the run in ``folder``; one that is complete returns its result again.
        trust: Modules that may be imported for the recipe's model, each by its full name.
        progress: Who watches.
        looks: What is evaluated besides.

    Returns:
        What result.json holds.

    Raises:
        InputError: If the input is wrong; nothing that was there is lost.
        MachineError: If the disk fails; the run can be resumed.
        Interrupted: After SIGINT or SIGTERM, once a checkpoint is written.
    """
    files.refuse_name(folder)
    files.refuse_among_images(folder, plan.recipe.data)
    if resume and folder.is_dir():
        files.refuse_links(folder)
    plan, weights = _with_weights(plan)
    log_kinds(plan.recipe.run)
    if resume and (folder / record.RESULT_FILE).exists():
        sessions.refuse_changed_recipe(folder, plan)
        refuse_large_groups(plan, dataset.train.largest_group())
        result = verify_finished(folder, plan, dataset).model_copy(
            update={"run": str(folder)}
        )  # it may have been moved
        if not plan.recipe.run.keep_key:
            key_file.delete_key(folder)
        return result
    if resume:
        sessions.refuse_no_run(folder)
    refuse_large_groups(plan, dataset.train.largest_group())
    recorded = sessions.recorded_environment(folder) if resume else None
    compiles = "; compiling takes some minutes" if plan.recipe.training.compile else ""
    with said_when_long(
        lambda: progress.message(f"still tracing the model and trying how to differentiate it{compiles}")
    ):
        learner = build_learner(plan, dataset, pick_device(device), recorded, trust, weights, progress.message)
    for line in learner.fitted.lines() if learner.fitted else []:
        progress.message(line)
    if plan.recipe.privacy is not None and learner.engine == "reference":
        why = f": {learner.refusal}" if learner.refusal else ""
        progress.message(f'engine "reference" computes one image at a time, which is slow{why}')
    environment = describe(
        learner.device,
        model=learner.identity(),
        engine=learner.engine,
        methods=learner.methods,
        microbatch_size=learner.microbatch_size,
        precision=plan.recipe.training.precision,
        compile=plan.recipe.training.compile,
    )
    if resume:
        session = sessions.resume(folder, plan, dataset, environment)
    else:
        files.create(folder)
        session = sessions.begin(folder, plan, dataset, environment)
    logs = Logs(folder, plan.recipe.run)
    try:
        return _Run(plan, dataset, learner, session, progress, looks, logs).finish()
    finally:
        logs.close()
        session.ledger.close()
        give_freed_memory_back()


def _with_weights(plan: Plan) -> tuple[Plan, Weights | None]:
    """The weights that a recipe starts from, and the plan with their digest.

    Raises:
        InputError: If they cannot be had, or are others than the recipe says.
    """
    model = plan.recipe.model
    model.refuse_missing_weights()
    if model.init_from is None:
        return plan, None
    weights = read_weights(model.name, model.init_from)
    if model.init_sha256 not in (None, weights.digest):
        raise InputError(
            f"model.init_from = {model.init_from!r} holds other weights (SHA-256 {weights.digest}) than "
            f"model.init_sha256 says ({model.init_sha256}). Name the file that was meant, or take the digest out."
        )
    stated = plan.recipe.model_copy(update={"model": model.model_copy(update={"init_sha256": weights.digest})})
    return dataclasses.replace(plan, recipe=stated), weights


@contextmanager
def said_when_long(say: Callable[[], None], seconds: float = 8.0) -> Iterator[None]:
    """Says something if the block takes longer than that."""
    timer = threading.Timer(seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def refuse_large_groups(plan: Plan, largest: tuple[str, int] | None) -> None:
    """Refuses a person with more images than the certificate would cover.

    Args:
        plan: Of the run.
        largest: The group with most training images and how many it has; None where images are not
            grouped.

    Raises:
        InputError: Naming the group.
    """
    privacy = plan.recipe.privacy
    if privacy is None or privacy.max_images_per_person is None or largest is None:
        return
    group, count = largest
    if count > privacy.max_images_per_person:
        raise InputError(
            f"group {group!r} has {count} training images, more than "
            f"privacy.max_images_per_person = {privacy.max_images_per_person}: its epsilon would "
            "not be covered. Raise the limit or remove images."
        )


class _Run:
    """The loop's variables; ``finish`` reads from top to bottom."""

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        learner: Learner,
        session: sessions.Session,
        progress: Progress,
        looks: Looks,
        logs: Logs,
    ) -> None:
        self.plan = plan
        self.dataset = dataset
        self.session = session
        self.progress = progress
        self.looks = looks
        self.logs = logs
        self.folder = session.folder
        self.mechanism = plan.mechanism
        self.metrics = RecordLines(self.folder / record.METRICS_FILE)
        self.metrics_private = RecordLines(self.folder / record.PRIVATE_METRICS_FILE, mode=0o600)
        self.seconds: dict[str, float] = {}
        self.draws = self._draws()
        learner.initialise(self.draws.initial_weights(), coins.toss(session, plan.recipe.audit.canaries))
        self.learner = learner
        self.state = learner.state
        self.seconds_before = 0.0
        self._go_on_from(session.checkpoint)

    def _draws(self) -> Draws:
        # A public seed makes common random numbers: runs that differ in batch size or data share
        # their noise. Such a run is marked as not private.
        recipe, session = self.plan.recipe, self.session
        is_public, is_accounted = recipe.run.seed is not None, recipe.privacy is not None
        return Draws(session.key, session.context, session.ledger, is_public=is_public, is_accounted=is_accounted)

    def _go_on_from(self, checkpoint: Checkpoint | None) -> None:
        self.first_step = 1
        if checkpoint is not None:
            self.state.load(checkpoint.tensors)
            self.learner.centre()
            self.first_step = checkpoint.facts["step"] + 1
            self.seconds_before = checkpoint.facts["seconds"]
        self.budget = Budget(self.plan, self.draws, self.first_step, self._lacks_first())
        self.started = time.perf_counter()
        self.metrics.keep_up_to(self.first_step - 1)
        self.metrics_private.keep_up_to(self.first_step - 1)
        self.logs.go_on_from(self.first_step)

    def finish(self) -> Result:
        """Takes every step that is left, evaluates, and writes what a finished run leaves."""
        try:
            return self._complete(*self._take_steps())
        except SumChanged as changed:
            # An operation that is not deterministic, or a model that computes otherwise than it
            # did.
            self.progress.message(
                f"{changed}: going back to the last checkpoint; what follows is drawn afresh and counts again"
            )
            self.session = sessions.begin_again(self.session, self.plan, self.dataset)
            self.draws = self._draws()
            self._go_on_from(self.session.checkpoint)
            return self._complete(*self._take_steps())

    def _take_steps(self) -> tuple[int, HeldOutScores]:
        """The last step, and the scores after it."""
        recipe, num_steps, draws = self.plan.recipe, self.mechanism.num_steps, self.draws
        evaluate_every = recipe.training.evaluate_every or max(num_steps // 10, 1)
        checkpoint_every = recipe.training.checkpoint_every or max(num_steps // 20, 1)
        self._state_what_is_planned()
        curve = self.budget.curve()
        if self.session.checkpoint is None:
            self._checkpoint(0)
        self._release_first()

        last_step = self.first_step - 1
        scores: HeldOutScores | None = None
        evaluated = False
        with watch_for_interrupts() as interrupted, collecting_usually():
            for step in range(self.first_step, num_steps + 1):
                if not self.budget.covers(step):
                    if step == 1:
                        raise InputError(
                            "the budget pays for what was released in another environment and is not kept, and for "
                            "nothing more: no classifier was trained. "
                            "Begin anew with another --output; both then add up."
                        )
                    self.progress.message(
                        f"stopped after step {step - 1}: updates that were drawn afresh used up the budget"
                    )
                    self._checkpoint(step - 1)
                    break
                with self._timed("sampling"):
                    randomness = draws.of_step(step, self.mechanism, self.learner.views)
                with self._timed("gradient"):
                    grad_sum, statistics = self.learner.collect(randomness, step)
                with self._timed("ledger"):  # on disk before anything is released
                    noise = draws.record(step, grad_sum)
                with self._timed("update"):
                    self.learner.update(grad_sum, noise, step)
                last_step = step

                asked = step in self.looks.steps or step == num_steps
                evaluated = asked or step % evaluate_every == 0
                if evaluated:
                    with self._timed("evaluation"):
                        scores = held_out_scores(self.learner, self.dataset)
                    reached = {"accuracy": scores.averaged.accuracy, "accuracy_last": scores.accuracy_last}
                    line = Metrics(step=step, epsilon=curve(step), **reached)
                    self.metrics.append(line)
                    self.logs.public(line)
                if evaluated or statistics.norms is not None:
                    looks = asked and self.looks.training_images
                    on_training_images = accuracy_on_training_images(self.learner) if looks else None
                    noted = self._noted(step, statistics, on_training_images)
                    self.metrics_private.append(noted)
                    self.logs.private(noted)
                accuracy = scores.averaged.accuracy if scores else None
                self.progress.step(
                    StepFacts(step, num_steps, curve(step), accuracy, self._images_per_second(step), evaluated)
                )
                if interrupted():
                    self._checkpoint(step)
                    raise Interrupted(step, num_steps)
                if step % checkpoint_every == 0 or step == num_steps:
                    with self._timed("checkpoint"):
                        self._checkpoint(step)
        return last_step, scores if evaluated and scores else held_out_scores(self.learner, self.dataset)

    def _release_first(self) -> None:
        """What is released of all examples before update 1, where there is such a thing; on the ledger as step 0."""
        if not self.budget.covers_first():
            if self._lacks_first():
                assert self.learner.first_release is not None
                self.progress.message(
                    "the mean of features: released already, but not kept, and the budget pays for that once: going on "
                    "without"
                )
            return
        assert self.learner.first_release is not None
        with self._timed("gradient"):
            sums = self.learner.first_release.collect(self.learner.train)
        with self._timed("ledger"):  # on disk before anything is released
            noise = self.draws.record(0, sums)
        self.learner.take_first_release(sums, noise)
        self._checkpoint(0)

    def _lacks_first(self) -> bool:
        return self.first_step == 1 and self.learner.lacks_first_release

    def _state_what_is_planned(self) -> None:
        """Writes a certificate that holds whenever the run ends: it counts all that is planned."""
        record.write(
            self.folder / record.CERTIFICATE_FILE,
            certificate(self.plan, self.budget.planned_mechanism(), self.session.ledger, "running", self._public),
        )

    @property
    def _public(self) -> PublicInputs:
        return public_inputs(self.plan, self.dataset)

    def _noted(self, step: int, statistics: Statistics, train_accuracy: float | None) -> PrivateMetrics:
        """For the owner; what a diverged run has no finite number for is None, and no reason to
        stop.
        """
        return PrivateMetrics(
            step=step,
            loss=finite(statistics.loss),
            clipped_fraction=finite(statistics.clipped_fraction),
            grad_norm=finite(statistics.grad_norm),
            clipped_square=finite(statistics.clipped_square),
            norms=statistics.norms,
            train_accuracy=train_accuracy,
            seconds=self._elapsed(),
            phases=self.seconds,
        )

    def _checkpoint(self, step: int) -> None:
        self.session.save(self.state.tensors(), step, self._elapsed() if step else 0.0)

    def _elapsed(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def _images_per_second(self, step: int) -> float:
        """Expected, not realised, batches: the realised count is sensitive."""
        return self.mechanism.batch_size * (step - self.first_step + 1) / max(time.perf_counter() - self.started, 1e-9)

    def _timed(self, phase: str) -> "_Timed":
        return _Timed(self.seconds, phase)

    def _complete(self, last_step: int, scores: HeldOutScores) -> Result:
        """Writes weights, certificate and result, then deletes the key."""
        spent = released(self.plan, self.session.ledger)
        claim = certificate(self.plan, spent, self.session.ledger, "complete", self._public)
        weights = self.folder / "model.safetensors"
        save_weights(weights, self.plan, self.learner, claim, scores.temperature)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        claim = finished(claim, weights, today)
        record.write(self.folder / record.CERTIFICATE_FILE, claim)
        if warning := warning_of_chance(self.learner, self.dataset.classes, scores):
            self.progress.message(warning)
        test_views = self.plan.recipe.augmentation.test_views
        with_views = scores_with_views(self.learner, self.dataset, test_views, self.progress.message)
        seconds = self._elapsed()
        found = result(
            claim,
            self.folder,
            self.dataset,
            scores,
            with_views,
            num_parameters=self.learner.num_parameters,
            images_per_second=self.mechanism.batch_size * max(last_step, 1) / max(seconds, 1e-9),
            seconds=seconds,
        )
        record.write(self.folder / record.RESULT_FILE, found)
        if not self.plan.recipe.run.keep_key:
            key_file.delete_key(self.folder)
        return found


class _Timed:
    """Adds the seconds of a block to one phase of the run."""

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self.seconds, self.phase = seconds, phase

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + time.perf_counter() - self.start
