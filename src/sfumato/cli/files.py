"""`sfumato report`, `norms`, `schema` and `cache`: what lies in files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfumato.cli import output
from sfumato.errors import InputError

if TYPE_CHECKING:
    from sfumato.data.store import Entry


def report(runs: list[Path], *, output_: Path | None = None, json_: bool = False) -> None:
    """Writes one self-contained page: about one run, or about several side by side. Of a sweep or a search, its page
    anew.

    Args:
        runs: Their folders; or that of one sweep or search.
        output_: An HTML file; default: report.html, in the folder of one run, or here for several.

    Example:
        sfumato report runs/one runs/two --output compared.html
    """
    from sfumato.reporting import html, several
    from sfumato.run_folder import record
    from sfumato.run_folder.files import refuse_drawing, write_atomically
    from sfumato.searching import page as search_page
    from sfumato.searching.result import SearchResult
    from sfumato.studies import page as sweep_page
    from sfumato.studies.result import Sweep

    kinds: dict[str, tuple[Any, Any]] = {
        "sweep": (Sweep, sweep_page.render),
        "search": (SearchResult, search_page.render),
    }
    name = next((name for name in kinds if len(runs) == 1 and (runs[0] / f"{name}.json").exists()), None)
    if name is None:
        path = several.report(runs, output_)
    else:
        path = output_ or runs[0] / f"{name}.html"
        refuse_drawing(path, "--output", html.ENDINGS)
        kind, render = kinds[name]
        write_atomically(path, render(record.read(runs[0] / f"{name}.json", kind)).encode())
    output.answer({"page": str(path)}, json_, lambda facts: output.say(f"page        {path}"))


def norms(run: Path, *, plot: Path | None = None, json_: bool = False) -> None:
    """Shows the norms of per-image gradients before clipping, of a run that was trained with
    training.norm_histogram_every. Not private: for the owner of the run alone.

    Args:
        plot: Draws the histograms here (.svg or .png), readable by you alone.

    Example:
        sfumato norms runs/xrays --plot norms.svg
    """
    from sfumato.reporting.norms import draw_norms, read_norms

    facts = read_norms(run)
    if plot is not None:
        draw_norms(facts, plot)
    output.answer(facts, json_, _show_norms)


def _show_norms(facts: dict[str, Any]) -> None:
    output.say(facts["warning"])
    output.say(f"{'step':>8}{'clipped':>12}{'median norm / C':>18}{'signal / noise':>17}{'not finite':>13}")
    for row in facts["histograms"]:
        median, ratio = ("-" if row[key] is None else f"{row[key]:.3g}" for key in ("median", "signal_to_noise"))
        clipped = output.per_cent(row["clipped_fraction"])
        output.say(f"{row['step']:>8}{clipped:>12}{median:>18}{ratio:>17}{row['not_finite']:>13}")
    output.say(
        "signal / noise: norm of the sum of clipped gradients over the root mean square norm of "
        "the noise, sigma C sqrt(number of weights)"
    )


def epsilon(runs: list[Path], *, delta: float | None = None, json_: bool = False) -> None:
    """Says what several runs on the same images spend together: epsilon, for whoever is in all of them, of somebody who
    sees all of them. Images may have been added or taken out between runs.

    Args:
        runs: Their folders.
        delta: Of all together; without it, the smallest of the runs'.

    Example:
        sfumato epsilon runs/one runs/two
    """
    from sfumato.accounting import formats
    from sfumato.accounting.accountants import epsilon_together
    from sfumato.json_record import finite
    from sfumato.run_folder import ledger, record
    from sfumato.run_folder.files import read_json

    lines = [ledger.read(run / ledger.LEDGER_FILE).run for run in runs]
    for run, line in zip(runs, lines, strict=True):
        claim = read_json(run / record.CERTIFICATE_FILE)
        if not claim.get("private") or line.delta is None:
            raise InputError(f"{run} is not private: what it shows has no epsilon, alone or with others. Leave it out.")
        if claim.get("selected_from") is not None:
            raise InputError(f"{run} was selected from others: no epsilon is known beside other runs. Leave it out.")
    if len({(line.unit, line.images_per_unit) for line in lines}) > 1:
        raise InputError(
            "these runs are of other units (an image, a person, other numbers of images of one): no one epsilon covers "
            "them. Name runs of one unit."
        )
    delta = min(line.delta for line in lines if line.delta is not None) if delta is None else delta
    spent = epsilon_together([line.mechanism for line in lines], delta, parts_of_data=True)
    facts = {
        "epsilon": finite(spent.epsilon),
        "delta": delta,
        "unit": lines[0].unit,
        "runs": [str(run) for run in runs],
    }
    said = (
        f"{len(runs)} runs together: epsilon {formats.epsilon_text(spent.epsilon)} at delta {formats.delta_text(delta)}"
    )
    output.answer(facts, json_, lambda facts: output.say(f"{said}, for one {facts['unit']} of all of them"))


def schema(name: str) -> None:
    """Prints the JSON schema of privacy.json, result.json, search.json, of a line of metrics.jsonl,
    metrics_private.jsonl or ledger.jsonl, or of what `sfumato audit --json` prints.

    Args:
        name: certificate, loop-certificate, result, metrics, private-metrics, ledger, search, audit, canary-audit,
            membership-audit or one-run-audit.

    Example:
        sfumato schema certificate
    """
    import pydantic

    from sfumato.auditing import record as audits
    from sfumato.run_folder import ledger, record
    from sfumato.searching.result import SearchResult

    known: dict[str, Any] = {
        "certificate": record.Certificate,
        "loop-certificate": record.LoopCertificate,
        "result": record.Result,
        "metrics": record.Metrics,
        "private-metrics": record.PrivateMetrics,
        "ledger": ledger.Line,
        "search": SearchResult,
        "audit": audits.AuditResult,
        "canary-audit": audits.CanaryResult,
        "membership-audit": audits.MembershipResult,
        "one-run-audit": audits.OneRunResult,
    }
    if name not in known:
        raise InputError(f"there is no schema {name!r}. Known are {', '.join(known)}.")
    found = pydantic.TypeAdapter(known[name]).json_schema(mode="serialization")
    output.print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **found})


def list_(*, json_: bool = False) -> None:
    """Names what is kept, of which folder, and how large it is.

    Example:
        sfumato cache list
    """
    from sfumato.data import store

    found = store.entries()
    _show_kept(found, f"nothing is kept in {store.cache_folder()}" if not found else None, json_)


def clear(*, json_: bool = False) -> None:
    """Removes all of it. It is made anew when it is needed.

    Example:
        sfumato cache clear
    """
    from sfumato.data import store

    removed = store.clear(output.note)
    total = sum(entry.num_bytes for entry in removed) / 1e6
    _show_kept(removed, f"removed {len(removed)}, {total:.1f} MB", json_)


def _show_kept(found: "list[Entry]", last: str | None, json_: bool) -> None:
    if json_:
        output.print_json({"entries": [{**vars(entry), "folder": str(entry.folder)} for entry in found]})
        return
    for entry in found:
        output.say(f"{entry.kind:<9}{entry.num_bytes / 1e6:>10.1f} MB  {entry.root or '-'}  ({entry.folder})")
    if last is not None:
        output.say(last)
