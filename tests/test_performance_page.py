"""docs/performance.md holds measured figures, and nothing else."""

from benchmarks import report


def test_the_page_is_what_the_results_say():
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run: python -m benchmarks.report"


def test_no_line_of_the_page_is_wider_than_120_columns():
    assert max(map(len, report.page().splitlines())) <= 120


def test_a_row_that_was_measured_twice_is_taken_from_the_newest_file():
    newest = report.read("clipping-2-cores-epyc-compiled-vit.json")["results"]
    ratio = next(row["ratio"] for row in newest if row["engine"] == "graph")
    lines = report.engine_part(report.ENGINE[0]).splitlines()
    rows = [line for line in lines if "ViT-tiny, 64 px" in line and "compiled" in line]
    assert len(rows) == 1
    assert f"| {report.number(ratio, 2)} |" in rows[0]


def test_figures_are_rounded_as_they_are_read():
    assert [report.number(value, 2) for value in (1.265, 1.2649, 0.075, 9)] == ["1.27", "1.26", "0.08", "9.00"]
