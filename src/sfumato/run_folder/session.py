"""Beginning a run and going on with it, without ever repeating noise on changed data."""

import dataclasses
import hmac
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch

from sfumato import config, randomness
from sfumato.errors import InputError
from sfumato.planning.resolve import Plan
from sfumato.run_folder import checkpoint as checkpoints
from sfumato.run_folder import entries as lines_of
from sfumato.run_folder import files, key_file, record
from sfumato.run_folder.checkpoint import Checkpoint
from sfumato.run_folder.ledger import Ledger

COINS_FILE = "audit_private.json"
"""Which canaries took part (`sfumato.run_folder.coins`)."""


@dataclasses.dataclass
class Session:
    """A run that may take steps.

    Attributes:
        folder: The run folder.
        key: The run's.
        ledger: Open for appending.
        checkpoint: Where to go on from; None at the very beginning.
        context: Digests of the recipe, and of the data under the run's key: what its randomness is
            derived from.
    """

    folder: Path
    key: bytes = dataclasses.field(repr=False)
    ledger: Ledger
    checkpoint: Checkpoint | None
    context: dict[str, str]

    def save(self, tensors: dict[str, torch.Tensor], step: int, seconds: float) -> None:
        """Writes the checkpoint of a step."""
        facts = {
            "run_id": self.ledger.lines[0]["run_id"],
            "step": step,
            "session": lines_of.last_session(self.ledger.lines)["session"],
            "ledger_lines": len(self.ledger.lines),
            "ledger_head": self.ledger.head,
            "data_digest": self.context["data"],
            "seconds": seconds,
        }
        checkpoints.save(self.folder, Checkpoint(tensors, facts), self.key)


def data_digest(key: bytes, dataset) -> str:
    """HMAC of the data as training sees it; a plain hash would confirm membership."""
    from sfumato.data.digest import fingerprint

    return fingerprint(dataset, randomness.subkey(key, "data digest"))


def begin(folder: Path, plan: Plan, dataset, environment: dict[str, Any], ledger: Ledger | None = None) -> Session:
    """Starts a run, or finishes a start that was cut short before its first checkpoint (and whose
    ledger is open).
    """
    ledger = ledger or Ledger.open(folder / "ledger.jsonl", exclusive=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    write_recipe(folder, plan)
    if _is_untouched(folder, ledger):
        seed = plan.recipe.run.seed
        key_file.write_key(folder, randomness.new_key() if seed is None else randomness.key_from_seed(seed))
    key = _key_of(folder, ledger)
    if len(ledger.lines) == 0:
        ledger.append(_run_line(randomness.run_id(key), plan))
    refuse_another_recipe(ledger, plan)
    if len(ledger.lines) == 1:
        ledger.append(lines_of.first_session_line(environment))
    last = lines_of.last_session(ledger.lines)
    if last["environment"] != environment:
        ledger.append(lines_of.next_session_line(last, 0, None, environment))
    return _session(folder, ledger, key, plan, dataset, None)


def resume(folder: Path, plan: Plan, dataset, environment: dict[str, Any]) -> Session:
    """Goes on from the newest checkpoint.

    In the environment of the last session the updates after the checkpoint are repeated
    bit for bit and count once. In any other they are drawn afresh and count again.

    Raises:
        InputError: If the recipe or the data changed, or the folder's parts disagree.
    """
    refuse_changed_recipe(folder, plan)
    ledger = Ledger.open(folder / "ledger.jsonl", exclusive=True)
    try:
        return _resume(folder, plan, dataset, environment, ledger)
    except BaseException:
        ledger.close()
        raise


def _resume(folder: Path, plan: Plan, dataset, environment: dict[str, Any], ledger: Ledger) -> Session:
    if _is_untouched(folder, ledger):
        return begin(folder, plan, dataset, environment, ledger)
    key = _key_of(folder, ledger)
    if not checkpoints.paths(folder) and not lines_of.releases(ledger.lines):
        return begin(folder, plan, dataset, environment, ledger)
    found = _authentic_checkpoint(folder, plan, dataset, ledger, key)
    write_places(folder, plan)
    facts = found.facts
    last = lines_of.last_session(ledger.lines)
    continues = facts["session"] == last["session"] or (facts["session"], facts["step"]) == (
        last["from_session"],
        last["first_step"] - 1,
    )
    if environment != last["environment"] or not continues:
        ledger.append(lines_of.next_session_line(last, facts["step"], facts["session"], environment))
    return _session(folder, ledger, key, plan, dataset, found)


def authenticated(folder: Path, plan: Plan, dataset) -> tuple[Ledger, Checkpoint]:
    """Ledger and newest checkpoint of a run that says it is complete while its key is still there.
    Nothing is written. Without a dataset (None) the images are not looked at.

    Raises:
        InputError: If one is not of this key, the recipe or the images are others, or the ledger or
            the checkpoint is not that of a complete run.
    """
    ledger = Ledger.open(folder / "ledger.jsonl")
    key = _key_of(folder, ledger)
    lines_of.refuse_other_lines(ledger.lines)
    found = _authentic_checkpoint(folder, plan, dataset, ledger, key)
    refuse_incomplete(folder, plan, ledger)
    after = lines_of.releases(ledger.lines[found.facts["ledger_lines"] :])
    if after or found.facts["step"] < plan.mechanism.num_steps and plan.recipe.privacy is None:
        raise InputError(
            f"{folder / record.RESULT_FILE} says that this run is complete, but its newest checkpoint is of update "
            f"{found.facts['step']}, not of the last: a checkpoint was deleted, or the result is another run's. "
            f"Restore it, or take {record.RESULT_FILE} away to go on with the run."
        )
    return ledger, found


def refuse_incomplete(folder: Path, plan: Plan, ledger: Ledger) -> None:
    """Refuses a ledger that has fewer releases than a complete run of the plan leaves.

    Raises:
        InputError: Naming the result that belongs to no such ledger.
    """
    if plan.recipe.privacy is None:
        return  # its updates are not on the ledger
    if lines_of.num_updates(ledger.lines) < plan.mechanism.num_steps:
        raise InputError(
            f"{folder / record.RESULT_FILE} says that this run is complete, but the ledger ends before its last "
            f"update: the result is another run's, or lines were removed. Take {record.RESULT_FILE} away to go on with "
            "the run."
        )


def _authentic_checkpoint(folder: Path, plan: Plan, dataset, ledger: Ledger, key: bytes) -> Checkpoint:
    """The newest checkpoint, once ledger, images and recipe are found to be what it was made with."""
    found = checkpoints.load_newest(folder, key)
    facts = found.facts
    if len(ledger.lines) < facts["ledger_lines"] or ledger.head_at(facts["ledger_lines"]) != facts["ledger_head"]:
        raise InputError(
            f"{ledger.path} has fewer or other lines than the checkpoint of step {facts['step']} "
            "recorded: lines were removed, so what was spent is not known. Restore the ledger "
            "from a copy, or start a new run."
        )
    if dataset is not None and not hmac.compare_digest(facts["data_digest"], data_digest(key, dataset)):
        raise InputError(
            "the training images changed since this run began (one was added, removed, altered, "
            "relabelled or reordered): going on would reuse its noise on other data. Restore the "
            "images, or start a new run with another --output; both runs then add up."
        )
    refuse_another_recipe(ledger, plan)
    return found


def begin_again(session: Session, plan: Plan, dataset) -> Session:
    """Goes back to the newest checkpoint and draws all updates after it afresh, in a session of its
    own.
    """
    found = checkpoints.load_newest(session.folder, session.key)
    last = lines_of.last_session(session.ledger.lines)
    facts = found.facts
    session.ledger.append(lines_of.next_session_line(last, facts["step"], facts["session"], last["environment"]))
    return _session(session.folder, session.ledger, session.key, plan, dataset, found)


# What a start that was cut short before its first checkpoint leaves, besides parts of files.
_OF_A_START = {
    "checkpoints",
    "ledger.jsonl",
    "recipe.toml",
    files.DATA_ROOT_FILE,
    files.INIT_FILE,
    key_file.KEY_FILE,
    COINS_FILE,
    "ledger.head",
    "privacy.json",
}


def refuse_no_run(folder: Path) -> None:
    """Refuses to go on in a folder without a checkpoint and without a release that holds anything
    but what the start of a run left.

    Raises:
        InputError: If there is nothing to resume: a run that began anew there would overwrite what
            is there.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is no run folder, so there is nothing to resume. Name the folder of a run, "
            "or leave out --resume."
        )
    ledger = Ledger.open(folder / "ledger.jsonl")
    if checkpoints.paths(folder) or any(line.get("kind") == "step" for line in ledger.lines):
        return
    found = [path for place in (folder, folder / "checkpoints") if place.is_dir() for path in sorted(place.iterdir())]
    found = [path for path in found if not (path.name.startswith(".") and path.name.endswith(".part"))]
    begun = {folder / name for name in _OF_A_START if ledger.path.exists() or name == "checkpoints"}
    if not key_file.has_key(folder):  # then no certificate was written yet
        begun.discard(folder / "privacy.json")
    strange = next((path for path in found if path not in begun), None)
    if strange is None and folder / "privacy.json" in found:
        claim = files.read_json(folder / "privacy.json")
        of_this_run = isinstance(claim, dict) and claim.get("run_id") == randomness.run_id(key_file.read_key(folder))
        strange = None if of_this_run else folder / "privacy.json"
    if strange is not None:
        raise InputError(
            f"{folder} holds {strange.name}, but no run that was begun there, so there is nothing "
            "to resume. Name the folder of a run, or leave out --resume and choose another "
            "--output."
        )


def _is_untouched(folder: Path, ledger: Ledger) -> bool:
    """Whether a start was cut short before there was a key, so that a new one may be drawn."""
    has_key = (folder / key_file.KEY_FILE).exists()
    return not (ledger.lines or ledger.head_path.exists() or checkpoints.paths(folder) or has_key)


def _key_of(folder: Path, ledger: Ledger) -> bytes:
    """The key under which the ledger goes on.

    Raises:
        InputError: If it is missing, or the ledger is another run's.
    """
    key = key_file.read_key(folder)
    if ledger.lines and ledger.lines[0].get("run_id") != randomness.run_id(key):
        raise InputError(
            f"{ledger.path} and {folder / key_file.KEY_FILE} are of two runs: what was spent "
            "under this key is not known. Restore both files from one copy, or start a new run."
        )
    ledger.appends_under(key)
    return key


class _Restored(pydantic.BaseModel):
    """What of an environment is made use of before the ledger's head is authenticated."""

    threads: Annotated[int, pydantic.Field(ge=1, le=4096)]
    engine: Literal["auto", "closed_form", "moments", "graph", "func", "reference"]
    microbatch_size: Annotated[int, pydantic.Field(ge=1, le=2**31)]
    methods: dict[str, str] = {}


def recorded_environment(folder: Path) -> dict[str, Any] | None:
    """The environment of the last session, which a resume restores as far as it can."""
    ledger = Ledger.open(folder / "ledger.jsonl")
    if len(ledger.lines) < 2:
        return None
    lines_of.refuse_other_lines(ledger.lines)
    if ledger.lines[0]["recipe_digest"] == lines_of.OWN_LOOP:
        raise InputError(f"{folder} holds a loop of somebody's own, and no recipe. Go on with it by sfumato.OwnLoop.")
    environment = lines_of.last_session(ledger.lines).get("environment")
    try:
        _Restored.model_validate(environment, strict=True)
    except pydantic.ValidationError:
        raise InputError(
            f"{ledger.path} names an environment that no run has: it was altered or damaged. Restore it from a copy."
        ) from None
    return environment


def write_recipe(folder: Path, plan: Plan) -> None:
    files.write_atomically(folder / "recipe.toml", config.to_toml(config.shareable(plan.recipe)).encode())
    write_places(folder, plan)


def write_places(folder: Path, plan: Plan) -> None:
    """Notes for the owner where images and weights lie: `sfumato resume` needs no more."""
    if plan.recipe.data.path is not None:
        files.write_place(folder, files.DATA_ROOT_FILE, plan.recipe.data.path)
    source = plan.recipe.model.init_from
    if source is not None and Path(source).exists():
        files.write_place(folder, files.INIT_FILE, source)


def refuse_changed_recipe(folder: Path, plan: Plan) -> None:
    """Compares with the recipe on disk, speed and device aside.

    Raises:
        InputError: Naming the first key that changed.
    """
    path = folder / "recipe.toml"
    if not path.exists():
        return
    before = config.releasing_keys(config.parse(config.read(path)))
    now = config.releasing_keys(plan.recipe)
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise InputError(
                f"{key} was {before.get(key)!r} when this run began and is {now.get(key)!r} now: "
                "a resumed run must keep its recipe. Give it as it was, or start a new run with "
                "another --output."
            )


def recipe_digest(recipe: config.Recipe) -> str:
    """SHA-256 of every key that changes a result."""
    return randomness.digest(config.releasing_keys(recipe))


def _run_line(run_id: str, plan: Plan) -> dict[str, Any]:
    privacy = plan.recipe.privacy
    return lines_of.run_line(
        run_id, plan.mechanism, privacy.clipping_norm if privacy else None, recipe_digest(plan.recipe)
    )


def refuse_another_recipe(ledger: Ledger, plan: Plan) -> None:
    """recipe.toml can be edited or lost; the chained ledger cannot, and the certificate is computed
    from it.

    Raises:
        InputError: If the ledger was begun under another recipe or number of images.
    """
    first = ledger.lines[0]
    if any(first.get(key) != value for key, value in _run_line(str(first.get("run_id")), plan).items()):
        raise InputError(
            f"{ledger.path} was begun under another recipe or number of images than this one: its "
            "epsilon would be wrong for these updates. Give the recipe as it was, or start a new "
            "run with another --output."
        )


def _session(folder: Path, ledger: Ledger, key: bytes, plan: Plan, dataset, found: Checkpoint | None) -> Session:
    ledger.settle()
    context = {"recipe": recipe_digest(plan.recipe), "data": data_digest(key, dataset)}
    return Session(folder, key, ledger, found, context)


def new_folder(name: str) -> Path:
    """runs/<recipe>-<UTC time>-<4 hex>."""
    import datetime
    import secrets

    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{name.replace('/', '-')}-{now}-{secrets.token_hex(2)}"


def newest_unfinished(name: str) -> Path:
    """The newest run of that recipe in runs/ that did not finish.

    Raises:
        InputError: If there is none.
    """
    named = re.compile(re.escape(name.replace("/", "-")) + r"-\d{8}T\d{6}Z-[0-9a-f]{4}")
    found = Path("runs").iterdir() if Path("runs").is_dir() else []
    candidates = [
        path
        for path in found
        if named.fullmatch(path.name)
        and path.is_dir()
        and not any((path / name).exists() for name in ("result.json", "run-1"))
        and not any(path.glob("seed-*"))  # nor is a series of runs one
    ]
    if not candidates:
        raise InputError(
            f"there is no unfinished run of {name} in {os.path.join('runs', '')}. Name the folder "
            "by --output, or leave out --resume."
        )
    return max(candidates, key=lambda path: path.stat().st_mtime)
