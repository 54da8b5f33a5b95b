"""Trials of a paid search that train nothing: they write down their settings, as the files of a finished run."""

import hmac
import json

import torch
from safetensors.torch import save_file

from sfumato import run_folder
from sfumato.run_folder import Ledger, write_json


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
            write_run(where, trial.optimizer.learning_rate, trial.ema.decay, self.sessions(len(self.made)))

    def decay(self, where):
        return json.loads((where / "result.json").read_text())["decay"]

    def score(self, where):
        return self.scored_by(where)

    def fingerprint(self, key):
        return hmac.digest(key, self.images, "sha256").hex()

    def report(self, where):
        (where / "report.html").write_text(where.name)


def write_run(folder, rate, decay, sessions=1):
    """What a finished run leaves, its weights two numbers."""
    run_folder.create(folder)
    ledger = Ledger.open(folder / "ledger.jsonl", exclusive=True)
    ledger.append({"kind": "run", "num_examples": 10})
    for session in range(sessions):
        ledger.append({"kind": "session", "session": session, "environment": {"device": "abacus"}})
        ledger.append({"kind": "step", "session": session, "step": 1})
    ledger.close()
    facts = {"epsilon": 1.0, "ledger_lines": len(ledger.lines), "ledger_head": ledger.head}
    write_json(folder / "privacy.json", facts)
    save_file({"weights": torch.tensor([rate, decay])}, folder / "model.safetensors", {"sfumato": json.dumps(facts), "recipe": ""})
    for name in ("recipe.toml", "metrics.jsonl", "metrics_private.jsonl", "key", "checkpoints/step-000000001.safetensors"):
        (folder / name).write_text("")
    write_json(folder / "result.json", {"run": str(folder), "rate": rate, "decay": decay, "seconds": 12.3, "images_per_second": 45.6})
