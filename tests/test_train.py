import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import seqmix.model  # noqa: F401
from seqmix.data import PackedRows, pack, prepare
from seqmix.layers.mixers import MIXERS
from seqmix.recipe import save_recipe
from seqmix.run import check_folder, latest_checkpoint, load_model, read_log
from seqmix.train import decayed_parameters, learning_rate, train
from tests import runs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twenty steps in one go."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = runs.recipe(folder, save_every=10, evaluate_every=10)
    train(recipe, folder / "run")
    return folder


def weights(out):
    return load_file(out / "model.safetensors")


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -------------------------------------------------------------------------------------- the loss


def test_training_learns_and_leaves_a_model_folder(whole):
    out = whole / "run"
    log = runs.losses(out)
    assert sorted(log) == list(range(1, 21))
    assert log[20][0] < log[1][0] - 0.2
    results = json.loads((out / "results.json").read_text())
    assert results["tokens"] == 20 * 4 * 32 and results["recipe"]["name"] == "tiny"
    assert results["versions"]["torch"] and "commit" in results
    held_out = [row["held_out_loss"] for row in read_log(out) if "held_out_loss" in row]
    assert len(held_out) == 2 and held_out[-1] == results["held_out_loss"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer_trains_and_then_decodes_as_it_recomputes(whole, tmp_path, mixer):
    train(runs.recipe(whole, mixer, steps=4), tmp_path / "run")
    losses = runs.losses(tmp_path / "run")
    assert losses[4][0] < losses[1][0]
    model, tokenizer = load_model(str(tmp_path / "run"))
    inputs = tokenizer("the whale", return_tensors="pt")
    tokens = [
        model.generate(**inputs, max_new_tokens=20, do_sample=False, use_cache=cached).tolist()
        for cached in (True, False)
    ]
    assert tokens[0] == tokens[1] and len(tokens[0][0]) > 10


def test_micro_batches_give_the_gradient_of_the_batch(whole, tmp_path):
    recipe = replace(runs.recipe(whole), steps=3, micro_batch_size=1)
    train(recipe, tmp_path / "run")
    alone, parts = runs.losses(whole / "run"), runs.losses(tmp_path / "run")
    for step in (1, 2, 3):
        assert parts[step] == pytest.approx(alone[step], rel=2e-5)


def test_the_held_out_loss_is_the_mean_over_all_held_out_tokens(tmp_path):
    recipe = runs.recipe(tmp_path, steps=2, evaluate_rows=7)
    recipe.data.held_out = 0.5
    results = train(recipe, tmp_path / "run")
    rows = PackedRows(prepare(recipe.data).held_out, recipe.sequence_length)
    model, _ = load_model(str(tmp_path / "run"))
    with torch.no_grad():
        loss = model(**pack([rows[i] for i in range(7)])).loss.item()
    assert results["held_out_loss"] == pytest.approx(loss, rel=1e-6)


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    recipe = runs.recipe(tmp_path, learning_rate=1e30, max_grad_norm=1e30)
    with pytest.raises(ValueError, match="the loss is no number at step"):
        train(recipe, tmp_path / "run")


# --------------------------------------------------------------------------- schedule and decay


def test_the_rate_rises_to_its_peak_and_ends_at_its_final_value(tmp_path):
    recipe = runs.recipe(
        tmp_path,
        steps=100,
        warmup_steps=10,
        initial_learning_rate=0.1,
        learning_rate=1.1,
        final_learning_rate=0.2,
        decay_steps=20,
    )
    rates = {
        schedule: [learning_rate(replace(recipe, schedule=schedule), n) for n in range(100)]
        for schedule in ("cosine", "wsd", "constant")
    }
    for rate in rates.values():
        assert rate[0] == pytest.approx(0.2) and rate[9] == pytest.approx(1.1)
    assert rates["constant"][9:] == [1.1] * 91
    assert rates["cosine"][54] == pytest.approx((1.1 + 0.2) / 2)
    assert rates["wsd"][79] == 1.1 and rates["wsd"][89] == pytest.approx((1.1 + 0.2) / 2)
    assert rates["cosine"][99] == pytest.approx(0.2) and rates["wsd"][99] == pytest.approx(0.2)


def test_the_run_follows_the_schedule(whole):
    recipe = runs.recipe(whole)
    logged = [row["learning_rate"] for row in read_log(whole / "run") if "loss" in row]
    assert logged == pytest.approx([learning_rate(recipe, n) for n in range(20)])


class Mixer(torch.nn.Module):
    no_decay = ("A_log", "inner.gate.weight")

    def __init__(self):
        super().__init__()
        self.A_log = torch.nn.Parameter(torch.zeros(2))
        self.proj = torch.nn.Linear(2, 2)
        linears = {name: torch.nn.Linear(2, 2) for name in ("gate", "up")}
        self.inner = torch.nn.ModuleDict(linears)


def test_norms_biases_and_what_a_layer_lists_do_not_decay():
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(3, 2), "norm": torch.nn.RMSNorm(2), "mixer": Mixer()}
    )
    expected = ["embed.weight", "mixer.proj.weight", "mixer.inner.up.weight"]
    assert decayed_parameters(model) == expected


# -------------------------------------------------------------------------- checkpoints, resuming


@pytest.mark.parametrize("workers", [0, 2])
def test_ten_and_ten_steps_in_a_new_process_equal_twenty_bit_for_bit(whole, tmp_path, workers):
    out = tmp_path / "run"
    shutil.copytree(whole / "run", out)
    shutil.rmtree(out / "checkpoint-20")
    for name in ("model.safetensors", "results.json"):
        (out / name).unlink()
    resume = ["train", out / "recipe.yaml", "--out", out, "--resume", "--num_workers", workers]
    runs.command(1, *resume)
    assert runs.losses(out) == runs.losses(whole / "run")
    assert same_weights(out, whole / "run")


def test_a_killed_run_resumes_and_a_half_written_checkpoint_is_not_taken(whole, tmp_path):
    out = tmp_path / "run"
    recipe = replace(runs.recipe(whole), save_every=1, keep_checkpoints=20, evaluate_every=10)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    command = [sys.executable, "-m", "seqmix.cli", "train", str(tmp_path / "recipe.yaml")]
    command += ["--out", str(out)]
    process = subprocess.Popen(command, env=runs.ENVIRONMENT, stderr=subprocess.DEVNULL)
    while process.poll() is None and latest_checkpoint(out) is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    last = latest_checkpoint(out)
    assert last is not None and not (out / "results.json").exists()
    torn = out / "checkpoint-19"
    shutil.copytree(last, torn, dirs_exist_ok=True)
    with (torn / "optimizer.pt").open("r+b") as file:
        file.truncate(100)
    assert latest_checkpoint(out) == last
    train(recipe, out, resume=True)
    assert runs.losses(out) == runs.losses(whole / "run")
    assert same_weights(out, whole / "run")


def test_a_checkpoint_is_whole_only_with_its_marker_and_every_byte(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole / "run", out)
    last, before = out / "checkpoint-20", out / "checkpoint-10"
    assert latest_checkpoint(out) == last
    marker = json.loads((last / "whole.json").read_text())
    assert marker["recipe"]["name"] == "tiny" and marker["versions"]["transformers"]
    (last / "scheduler.pt").rename(tmp_path / "scheduler.pt")
    assert latest_checkpoint(out) == before
    (tmp_path / "scheduler.pt").rename(last / "scheduler.pt")
    assert latest_checkpoint(out) == last
    (last / "whole.json").write_text("{")
    assert latest_checkpoint(out) == before
    (before / "whole.json").unlink()
    assert latest_checkpoint(out) is None


def test_only_the_last_checkpoints_are_kept(tmp_path):
    recipe = runs.recipe(tmp_path, steps=6, save_every=1, keep_checkpoints=2)
    train(recipe, tmp_path / "run")
    kept = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == ["checkpoint-5", "checkpoint-6"]


def test_a_run_can_be_made_longer(tmp_path):
    recipe = runs.recipe(tmp_path, steps=4, save_every=4, schedule="constant")
    train(recipe, tmp_path / "run")
    train(replace(recipe, steps=6), tmp_path / "run", resume=True)
    train(replace(recipe, steps=6), tmp_path / "straight")
    assert runs.losses(tmp_path / "run") == runs.losses(tmp_path / "straight")


def test_a_model_continues_from_another_with_its_tokenizer(whole, tmp_path):
    recipe = runs.recipe(whole, steps=2, initial_model=str(whole / "run"), warmup_steps=0)
    train(replace(recipe, model={}), tmp_path / "run")
    first, last = runs.losses(tmp_path / "run")[1][0], runs.losses(whole / "run")[20][0]
    assert abs(first - last) < 0.3
    tokenizers = [json.loads((p / "run/tokenizer.json").read_text()) for p in (whole, tmp_path)]
    assert tokenizers[0] == tokenizers[1]


# ------------------------------------------------------------------------------------ the folder


def test_a_run_is_not_overwritten_unless_asked(whole, tmp_path):
    recipe = runs.recipe(whole)
    with pytest.raises(FileExistsError, match="holds a run; --resume continues it"):
        check_folder(recipe, whole / "run", resume=False, overwrite=False)
    check_folder(recipe, whole / "run", resume=False, overwrite=True)
    check_folder(recipe, tmp_path / "new", resume=False, overwrite=False)
    (tmp_path / "precious").write_text("")
    for allowed in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(FileExistsError, match="is no run of ours"):
            check_folder(recipe, tmp_path, **allowed)


def test_another_recipe_does_not_resume_a_run(whole):
    changed = replace(runs.recipe(whole), seed=1, learning_rate=2e-3)
    with pytest.raises(ValueError, match="another seed, learning_rate"):
        check_folder(changed, whole / "run", resume=True, overwrite=False)


def test_a_damaged_recipe_is_not_resumed(whole, tmp_path):
    for text in ("a: [", "", "just words"):
        (tmp_path / "recipe.yaml").write_text(text)
        with pytest.raises(ValueError, match="cannot resume: .*recipe.yaml is damaged"):
            check_folder(runs.recipe(whole), tmp_path, resume=True, overwrite=False)


def test_a_recipe_that_cannot_run_leaves_the_old_run_in_place(whole):
    before = sorted(p.name for p in (whole / "run").iterdir())
    for changes in (
        {"model": {"mixers": ["none"]}},
        {"batch_size": 5, "micro_batch_size": 2},
        {"sequence_length": 10**6},
        {"report_to": ["no_such_logger"]},
    ):
        with pytest.raises(ValueError):
            train(replace(runs.recipe(whole), **changes), whole / "run", overwrite=True)
    assert sorted(p.name for p in (whole / "run").iterdir()) == before


# ---------------------------------------------------------------------------------- two processes


@pytest.mark.slow
def test_two_processes_compute_what_one_does(whole, tmp_path):
    recipe = replace(runs.recipe(whole), steps=5, evaluate_every=5)
    save_recipe(recipe, tmp_path / "recipe.yaml")
    runs.command(2, "train", tmp_path / "recipe.yaml", "--out", tmp_path / "two")
    train(recipe, tmp_path / "one")
    one, two = runs.losses(tmp_path / "one"), runs.losses(tmp_path / "two")
    assert sorted(two) == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "two/results.json").read_text())["processes"] == 2
    for step in one:
        assert two[step] == pytest.approx(one[step], rel=2e-5)
    held_out = [read_log(tmp_path / name)[-1]["held_out_loss"] for name in ("one", "two")]
    assert math.isclose(*held_out, rel_tol=2e-5)
