"""JSON schemas of the files of a run, made from the types that write and read them."""

from typing import Any

import pydantic

from sfumato.run_folder.ledger import Line
from sfumato.run_folder.record import Certificate, LoopCertificate, Metrics, PrivateMetrics, Result

SCHEMAS: dict[str, Any] = {
    "certificate": Certificate,
    "loop-certificate": LoopCertificate,
    "result": Result,
    "metrics": Metrics,
    "private-metrics": PrivateMetrics,
    "ledger": Line,
}
"""By name: privacy.json (of a run, of a loop of one's own), result.json, and a line of metrics.jsonl,
metrics_private.jsonl and ledger.jsonl.
"""


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a type such as those of `SCHEMAS`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **pydantic.TypeAdapter(kind).json_schema(mode="serialization"),
    }
