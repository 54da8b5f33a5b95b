"""`sfumato schema`: the JSON schema of a file that a run leaves."""

from typing import Annotated

import typer

from sfumato.cli import output
from sfumato.errors import InputError


def schema(
    name: Annotated[str, typer.Argument(help="certificate, result, metrics, private-metrics or ledger.")],
) -> None:
    """Prints the JSON schema of privacy.json, result.json, or of a line of metrics.jsonl, metrics_private.jsonl or
    ledger.jsonl.
    """
    from sfumato.run_folder.schemas import SCHEMAS, schema_of

    if name not in SCHEMAS:
        raise InputError(f"there is no schema {name!r}. Known are {', '.join(SCHEMAS)}.")
    output.print_json(schema_of(name))
