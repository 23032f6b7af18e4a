"""Tables and figures of a suite's result, for the documents.

    python -m seqmix.bench.tables benchmarks/results/path.json docs/results.md README.md

writes each table anew between its marks, `<!-- path: forward -->` and `<!-- end -->`, and the
figure beside the result.
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from seqmix.bench.suite import SUITES

Row = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """One line a shape, one column a candidate.

    columns: heading -> what candidates' names begin with; the best of them counts.
    cell: a row's text.
    """

    group: str
    name: str  # of the pass
    columns: dict[str, str]
    cell: Callable[[Row], str]

    def markdown(self, result: Result) -> str:
        """Return the table of the rows that belong to it."""
        rows = result["rows"]
        lines: dict[tuple, list[Row]] = {}
        letters: list[str] = []
        for row in rows:
            if row["group"] == self.group and row["pass"] == self.name:
                letters = [key for key in row if len(key) == 1]
                lines.setdefault(tuple(row[key] for key in letters), []).append(row)
        table = [[", ".join(letters), *self.columns]]
        table += [
            [", ".join(map(str, shape)), *self._cells(found)] for shape, found in lines.items()
        ]
        text = [f"| {' | '.join(cells)} |" for cells in table]
        return "\n".join([text[0], "|---" * len(table[0]) + "|", *text[1:]])

    def _cells(self, rows: list[Row]) -> list[str]:
        missing = [row["note"] for row in rows if row["name"] == "all"]
        return [
            missing[0].removeprefix("not measured: ") if missing else self._best(rows, start)
            for start in self.columns.values()
        ]

    def _best(self, rows: list[Row], start: str) -> str:
        found = [row for row in rows if row["name"] == start or row["name"].startswith(start + " ")]
        cells = [row for row in found if "note" not in row]
        if cells:
            return self.cell(min(cells, key=lambda row: row["gpu_ms"] or row["launched_ms"]))
        return "out of memory" if any("memory" in row["note"] for row in found) else "-"


def time(row: Row) -> str:
    """GPU milliseconds and the ratio to the best of the base."""
    return f"{row['gpu_ms']:.3g} ({row['gpu_ratio']:.2f})"


def launched(row: Row) -> str:
    return f"{row['launched_ms']:.3g} ({row['launched_ratio']:.2f})"


def microseconds(row: Row) -> str:
    return f"{1e3 * row['gpu_ms']:.0f} ({row['gpu_ratio']:.2f})"


def memory(row: Row) -> str:
    return f"{row['mib']:,.0f} ({row['mib_ratio']:.2f})"


@dataclass(frozen=True)
class Goal:
    """The largest ratio of `key` that is wanted of the rows with `where`.

    over: the candidate to compare with; None for the ratio to the base.
    """

    name: str
    most: float
    where: Row
    key: str = "gpu_ms"
    over: str | None = None

    def measured(self, rows: list[Row]) -> float | None:
        """Return the ratio, the largest if there are several; None if it was not measured."""
        found = [row for row in rows if self.where.items() <= row.items() and row.get(self.key)]
        if self.over is None:
            return max(
                (row[f"{self.key.removesuffix('_ms')}_ratio"] for row in found), default=None
            )
        ratios = []
        for row in found:
            same = {k: v for k, v in row.items() if len(k) == 1 or k in ("group", "pass")}
            same["name"] = self.over
            ratios += [row[self.key] / r[self.key] for r in rows if same.items() <= r.items()]
        return max(ratios, default=None)


@dataclass(frozen=True)
class Goals:
    """One line a goal."""

    goals: tuple[Goal, ...]

    def markdown(self, result: Result) -> str:
        """Return goals beside what was measured."""
        lines = ["| ratio | goal | measured | |", "|---|---|---|---|"]
        for goal in self.goals:
            found = goal.measured(result["rows"])
            cells = ["-", ""] if found is None else [f"{found:.2f}", _verdict(found, goal.most)]
            lines.append(f"| {goal.name} | {goal.most:.2f} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _verdict(found: float, most: float) -> str:
    return "met" if found <= most else f"missed by {100 * (found / most - 1):.0f}%"


@dataclass(frozen=True)
class Source:
    """Where the figures come from, and the drawing."""

    def markdown(self, result: Result) -> str:
        """Return file, machine, versions, commit and time, and the picture."""
        file = f"../benchmarks/results/{result['suite']}"
        made = result["versions"]
        versions = ", ".join(f"{name} {made[name]}" for name in ("torch", "triton") if made[name])
        place = f"{', '.join(result['machine']['gpus'])}, {versions}, {result['time'][:10]}"
        commit = (result["commit"] or "unknown")[:12]
        line = f"From [{result['suite']}.json]({file}.json): {place}, commit {commit}."
        return f"{line}\n\n![Time over T]({file}.svg)"


@dataclass(frozen=True)
class First:
    """Seconds of the first calls of a process, in order."""

    def markdown(self, result: Result) -> str:
        """Return one line a shape."""
        lines = ["| B, T, H, G, d | forward | backward |", "|---|---|---|"]
        for row in result["first_calls"]:
            if "note" not in row:
                shape = ", ".join(str(row[letter]) for letter in "BTHGd")
                lines.append(f"| {shape} | {row['forward_s']:.2f} | {row['backward_s']:.2f} |")
        return "\n".join(lines)


def update(text: str, suite: str, result: Result) -> str:
    """Return a document with the tables of a suite made anew."""
    tables = import_module(SUITES[suite]).TABLES

    def anew(match: re.Match) -> str:
        if match[1] != suite:
            return match[0]
        table = tables[match[2]].markdown(result)
        return f"<!-- {suite}: {match[2]} -->\n\n{table}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+): ([\w ]+) -->\n.*?<!-- end -->", anew, text, flags=re.S)


def figure(result: Result, path: Path) -> None:
    """Draw forward and backward over T: the paper's shapes, and ratios to SDPA at ours."""
    columns = import_module(SUITES[result["suite"]]).COLUMNS
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "seqmix"
    from matplotlib import pyplot

    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for heading, start in columns.items():
        dashed = {"linestyle": "--" if start.startswith("fla") else "-", "marker": "o"}
        for axes, key, wanted in (
            (left, "gpu_ms", lambda row: row["group"] == "paper"),
            (right, "gpu_ratio", lambda row: row["group"] == "shapes" and row["d"] == 64),
        ):
            best: dict[int, float] = {}
            for row in result["rows"]:
                if row["pass"] != "both" or not wanted(row) or row.get(key) is None:
                    continue
                grouped = row["H"] != row["G"]
                if not grouped and (row["name"] == start or row["name"].startswith(start + " ")):
                    best[row["T"]] = min(row[key], best.get(row["T"], row[key]))
            if best:
                axes.plot(*zip(*sorted(best.items()), strict=True), label=heading, **dashed)
    left.set(title="32 rows, 32 heads of 64", ylabel="forward + backward, ms", yscale="log")
    right.set(title="16,384 tokens and more, heads of 64", ylabel="ratio to the best SDPA")
    for axes in (left, right):
        axes.set(xlabel="T", xscale="log")
        axes.xaxis.set_major_formatter(lambda T, _: f"{T / 1024:.3g}k")
        axes.set_xticks(sorted({row["T"] for row in result["rows"] if "T" in row}), minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    drawing.savefig(path, metadata={"Date": None})
    pyplot.close(drawing)


def main(words: list[str]) -> None:
    source, *pages = map(Path, words)
    result = json.loads(source.read_text())
    figure(result, source.with_suffix(".svg"))
    for page in pages:
        page.write_text(update(page.read_text(), source.stem, result))


if __name__ == "__main__":
    main(sys.argv[1:])
