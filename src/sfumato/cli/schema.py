"""`sfumato schema`: the JSON schema of a file that a run or a search leaves."""

from typing import Annotated

import typer

from sfumato.cli import output
from sfumato.errors import InputError


def schema(
    name: Annotated[
        str,
        typer.Argument(
            help="certificate, result, metrics, private-metrics, ledger, search, audit, canary-audit, "
            "membership-audit or one-run-audit."
        ),
    ],
) -> None:
    """Prints the JSON schema of privacy.json, result.json, search.json, of a line of metrics.jsonl,
    metrics_private.jsonl or ledger.jsonl, or of what `sfumato audit --json` prints.
    """
    from sfumato.auditing.record import AuditResult, CanaryResult, MembershipResult, OneRunResult
    from sfumato.run_folder.schemas import SCHEMAS, schema_of
    from sfumato.searching.result import SearchResult

    audits = {
        "audit": AuditResult,
        "canary-audit": CanaryResult,
        "membership-audit": MembershipResult,
        "one-run-audit": OneRunResult,
    }
    known = {**SCHEMAS, "search": SearchResult, **audits}
    if name not in known:
        raise InputError(f"there is no schema {name!r}. Known are {', '.join(known)}.")
    output.print_json(schema_of(known[name]))
