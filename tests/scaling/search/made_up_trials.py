"""Trials of a paid search that train nothing: they write down their settings, as the files of a finished run."""

import hmac
import json

import torch
from safetensors.torch import save_file

from sfumato import config
from sfumato.run_folder import files, ledger, record
from sfumato.run_folder.ledger import chained_line
from tests.reporting.folders import finished

PUBLISHED = {
    "ledger.jsonl",
    "metrics.jsonl",
    "model.safetensors",
    "privacy.json",
    "recipe.toml",
    "report.html",
    "result.json",
}
"""What is left of the run that a private search selects."""


class Trials:
    """Stands for `paid.Trials`; may be killed at one trial, or draw the updates of some afresh.

    Attributes:
        made: (folder's name, learning rate, decay) of each trial that was trained, in order.
    """

    def __init__(self, killed_at=None, score=None, images=b"images", sessions=lambda number: 1):
        self.made, self.killed_at, self.images, self.sessions = [], killed_at, images, sessions
        self.scored_by = score or self.decay

    def train(self, trial, where):
        if len(self.made) == self.killed_at:
            raise KeyboardInterrupt
        self.made.append((where.name, trial.optimizer.learning_rate, trial.ema.decay))
        if not where.exists():
            write_run(where, trial, self.sessions(len(self.made)))

    def decay(self, where):
        return round(1e9 * decay_of(where))

    def score(self, where):
        return self.scored_by(where)

    def fingerprint(self, key):
        return hmac.digest(key, self.images, "sha256").hex()

    def report(self, where):
        (where / "report.html").write_text(where.name)

    def verify(self, where):
        return record.read(where / "result.json", record.Result)


def decay_of(folder):
    return config.parse(config.read(folder / "recipe.toml")).ema.decay


def write_run(folder, recipe, sessions=1):
    """What a finished run leaves, its weights two numbers."""
    rate, decay = recipe.optimizer.learning_rate, recipe.ema.decay
    files.create(folder)
    lines = [chained_line({"kind": "run", "num_examples": 10}, ledger.GENESIS)]
    for session in range(sessions):
        lines.append(
            chained_line(
                {"kind": "session", "session": session, "environment": {"device": "abacus"}}, lines[-1]["hash"]
            )
        )
        lines.append(chained_line({"kind": "step", "session": session, "step": 1}, lines[-1]["hash"]))
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    facts = {"epsilon": 1.0, "ledger_lines": len(lines), "ledger_head": lines[-1]["hash"]}
    (folder / "privacy.json").write_text(json.dumps(facts))
    save_file(
        {"weights": torch.tensor([rate, decay])},
        folder / "model.safetensors",
        {"sfumato": json.dumps(facts), "recipe": ""},
    )
    (folder / "recipe.toml").write_text(config.to_toml(config.shareable(recipe)))
    for name in ("metrics.jsonl", "metrics_private.jsonl", "key", "checkpoints/step-000000001.safetensors"):
        (folder / name).write_text("")
    (folder / "result.json").write_text(
        json.dumps(finished(["a", "b"], run=str(folder), seconds=12.3, images_per_second=45.6))
    )
