"""The benchmark of PaTH at sizes of a test, on a processor too: what it reports, not how fast."""

import pytest
import torch

from seqmix.bench import path, suite, tables
from seqmix.bench.suite import Suite, Workload
from seqmix.cli import main

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small(shape, checked="small"):
    return Workload(
        group="shapes",
        shape=dict(zip("BTHGd", shape, strict=True)),
        make=lambda: path.training(path.inputs(*shape, device=DEVICE), False),
        checked=checked,
        check=lambda: path.check(2, 1, 16, DEVICE, T=70),
        ours=path.OURS,
    )


def measured(*works, **options):
    run = Suite(rounds=1, **options)
    run.run(list(works))
    return run


def test_a_workload_is_checked_and_then_measured(capsys):
    run = measured(small((1, 80, 2, 1, 16)))
    printed = capsys.readouterr().out.splitlines()
    assert "error against float64, small: y" in printed[1] and "dlog_forget" in printed[1]
    assert set(run.errors["small"]) >= {"y", "dq", "dk", "dv", "dw", "dbeta", "dlog_forget"}
    assert all(0 < error < 0.02 for error in run.errors["small"].values())
    names = {(row["name"], row["pass"]) for row in run.rows}
    assert names == {
        (name, step)
        for name in [*path.BACKENDS, "path", "path_fox"]
        for step in ("forward", "both")
    }
    ours = [row for row in run.rows if row["name"] in path.OURS]
    assert all(row["launched_ms"] > 0 and row["launched_ratio"] > 0 for row in ours)
    assert all(len(row) >= 8 and row["T"] == 80 for row in run.rows)


def test_one_decoded_token_equals_all_tokens_at_once(capsys):
    assert path.check_decoding(2, 16, DEVICE, 70, torch.float16)["y"] < 0.02
    work = Workload(
        group="decode",
        shape=dict(zip("NTHGd", (1, 70, 2, 1, 16), strict=True)),
        make=lambda: path.decoding(1, 70, 2, 1, 16, peers=False, device=DEVICE),
        checked="decoding",
        check=lambda: {"y": 0.0},
        ours=path.OURS,
        passes=("decode",),
    )
    rows = {row["name"]: row for row in measured(work).rows}
    assert rows["path"]["launched_ms"] > 0 and rows["path_fox"]["launched_ms"] > 0


def test_kernels_without_a_backward_are_checked_forward(monkeypatch):
    def only_forward(*x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise NotImplementedError
        return attend(*x)

    attend = path._attend
    monkeypatch.setattr(path, "_attend", only_forward)
    found = path.check(2, 1, 16, DEVICE, T=70)
    assert set(found) == {"y"} and found["y"] < 0.01


def test_what_fails_is_a_row_that_says_why(capsys):
    def memory(*_):
        raise torch.OutOfMemoryError

    def broken(*_):
        raise NotImplementedError("not for\nthis size")

    x = torch.zeros(2, 2)
    cases = {"sdpa": (torch.sin, [x]), "full": (memory, [x]), "broken": (broken, [x])}
    work = Workload("shapes", {"T": 2}, lambda: cases, "a", dict, ours=())
    rows = {row["name"]: row for row in measured(work).rows if row["pass"] == "both"}
    assert rows["sdpa"]["launched_ms"] > 0 and "note" not in rows["sdpa"]
    assert rows["full"]["note"] == "out of memory"
    assert rows["broken"]["note"] == "not for this size"
    assert "out of memory" in capsys.readouterr().out


def test_what_is_wrong_is_not_timed(capsys):
    x = torch.zeros(2, 2)
    cases = {"sdpa": (torch.sin, [x]), "path": (torch.cos, [x])}
    work = Workload("shapes", {"T": 2}, lambda: cases, "a", lambda: {"dw": 0.5}, ours=("path",))
    rows = {row["name"]: row for row in measured(work).rows}
    assert rows["path"]["note"] == "wrong: dw is off by 5.0e-01"
    assert "note" not in rows["sdpa"]
    work = Workload("shapes", {"T": 2}, lambda: cases, "a", lambda: {"y": torch.nan}, ("path",))
    assert "wrong" in measured(work).rows[-1]["note"]

    def unserved():
        raise NotImplementedError("not here")

    work = Workload("shapes", {"T": 2}, lambda: cases, "a", unserved, ("path",))
    assert measured(work).rows[-1]["note"] == "not here"


def test_what_the_time_does_not_allow_is_reported(capsys):
    run = measured(small((1, 80, 2, 1, 16)), seconds=-1)
    assert [row["note"] for row in run.rows] == ["not measured: time is up"]


@pytest.mark.skipif(DEVICE == "cuda", reason="measures for minutes")
@pytest.mark.parametrize("words", [["--peers"], ["--tune"], []])
def test_without_a_gpu_it_is_one_line_and_exit_code_2(capsys, words):
    assert main(["bench", "path", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("seqmix bench: path at many shapes needs a GPU")


def rows(group="shapes", step="both", **shape):
    sizes = {"B": 1, "T": 64, "H": 2, "G": 2, "d": 64} | shape
    values = {"gpu_ms": 2.0, "launched_ms": 3.0, "mib": 8.0}
    ratios = {"gpu_ratio": 1.0, "launched_ratio": 1.0, "mib_ratio": 1.0}
    common = {"group": group, **sizes, "pass": step}
    return [
        {**common, "name": "sdpa cudnn", **values, **ratios},
        {**common, "name": "sdpa flash", **values, **ratios, "gpu_ms": 3.0, "gpu_ratio": 1.5},
        {**common, "name": "path", **values, "gpu_ms": 4.0, **ratios, "gpu_ratio": 2.0},
        {**common, "name": "fla path", "note": "out of memory"},
    ]


def test_tables_take_the_best_sdpa_and_keep_what_failed():
    table = path.TABLES["summary"].markdown({"rows": rows() + rows(step="forward")})
    assert table.splitlines() == [
        "| B, T, H, G, d | best SDPA | PaTH | PaTH-FoX | FLA PaTH |",
        "|---|---|---|---|---|",
        "| 1, 64, 2, 2, 64 | 2 (1.00) | 4 (2.00) | - | out of memory |",
    ]
    late = {"group": "shapes", "T": 1, "pass": "both", "name": "all"}
    late["note"] = "not measured: time is up"
    table = path.TABLES["summary"].markdown({"rows": [late]})
    assert table.splitlines()[-1] == "| 1 |" + " time is up |" * 4


def test_documents_are_updated_between_their_marks():
    page = (
        "a\n<!-- path: summary -->\nold\n<!-- end -->\nb\n<!-- other: x -->\nkept\n<!-- end -->\n"
    )
    result = {"rows": rows()}
    once = tables.update(page, "path", result)
    assert "old" not in once and "| 1, 64, 2, 2, 64 |" in once
    assert once.endswith("\nb\n<!-- other: x -->\nkept\n<!-- end -->\n")
    assert tables.update(once, "path", result) == once


def test_goals_say_what_is_met_and_by_how_much_the_rest_is_missed():
    found = rows(T=2048, H=32, G=32)
    found += [{**found[2], "name": "path_fox", "gpu_ms": 5.0}]
    lines = path.TABLES["goals"].markdown({"rows": found}).splitlines()
    assert "| forward + backward, heads of 64, T = 2,048 | 2.00 | 2.00 | met |" in lines
    assert (
        "| PaTH-FoX over PaTH, forward + backward, at worst | 1.10 | 1.25 | missed by 14% |"
        in lines
    )
    assert "| one decoded token, at worst | 1.10 | - |  |" in lines


def test_the_source_says_what_measured():
    versions = {"torch": "2.11.0", "triton": "3.6.0"}
    result = {"suite": "path", "versions": versions, "machine": {"gpus": ["NVIDIA H200"]}}
    result |= {"commit": "0123456789abcdef", "time": "2026-12-01T00:00:00Z"}
    text = path.TABLES["source"].markdown(result)
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-12-01, commit 0123456789ab." in text
    assert "(../benchmarks/results/path.json)" in text and "path.svg" in text


def test_first_calls_are_told_in_order():
    calls = [{"B": 1, "T": 2, "H": 3, "G": 3, "d": 4, "forward_s": 1.234, "backward_s": 2.0}]
    text = path.TABLES["first"].markdown({"first_calls": calls + [{"note": "failed"}]})
    assert text.splitlines()[2:] == ["| 1, 2, 3, 3, 4 | 1.23 | 2.00 |"]


def test_the_figure_is_drawn_the_same_twice(tmp_path):
    result = {"suite": "path", "rows": rows() + rows(T=128) + rows("paper") + rows("paper", T=128)}
    for name in ("one.svg", "two.svg"):
        tables.figure(result, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_a_peer_at_few_shapes_is_named_in_the_figure(tmp_path):
    peer = [{**rows()[0], "name": "fla path"}]
    result = {"suite": "path", "rows": rows("paper") + rows() + peer}
    tables.figure(result, tmp_path / "figure.svg")
    assert "<!-- FLA PaTH -->" in (tmp_path / "figure.svg").read_text()


@pytest.mark.gpu
def test_gpu_time_is_below_launched_time():
    x = torch.ones(64, 64, device="cuda")
    timer = suite.GpuTimer()

    def call():
        for _ in range(50):
            x.mul_(1.0)

    launched = sorted(timer.launched(call) for _ in range(9))[4]
    queued = sorted(timer.queued(call) for _ in range(9))[4]
    assert 0 < queued < launched
