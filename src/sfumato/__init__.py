"""Sfumato trains image classifiers so that no single training image shows, while accuracy stays
high.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Ema": "sfumato.training.state",
    "Mechanism": "sfumato.accounting.mechanism",
    "PrivateLoop": "sfumato.training.private_loop",
    "audit_canary": "sfumato.auditing.canary",
    "audit_membership": "sfumato.auditing.membership",
    "audit_one_run": "sfumato.auditing.one_run",
    "audit_scores": "sfumato.auditing.bounds",
    "clipped_grad": "sfumato.clipping",
    "epsilon": "sfumato.accounting.accountants",
    "export": "sfumato.exporting.export",
    "fix_groupnorm": "sfumato.models.layers",
    "evaluate": "sfumato.evaluation.evaluate",
    "load": "sfumato.evaluation.classifier",
    "plan": "sfumato.scaling.plan",
    "predict": "sfumato.evaluation.classifier",
    "repeat": "sfumato.training.trainer",
    "report": "sfumato.reporting.several",
    "resume": "sfumato.training.trainer",
    "search": "sfumato.searching.search",
    "simulate": "sfumato.scaling.simulate",
    "sweep": "sfumato.studies.sweep",
    "train": "sfumato.training.trainer",
    "verify": "sfumato.exporting.verify",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sfumato' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
