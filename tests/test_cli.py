import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from seqmix import cli
from seqmix.cli import main
from seqmix.quickstart import PROMPT, RECIPES
from seqmix.recipe import load_recipe, save_recipe
from seqmix.run import read_log
from tests import runs

COMMANDS = ["quickstart", "train", "evaluate", "generate", "bench", "doctor"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe and a model trained with it through the command."""
    folder = tmp_path_factory.mktemp("cli")
    save_recipe(runs.recipe(folder), folder / "recipe.yaml")
    command = ["train", str(folder / "recipe.yaml"), "--steps", "5", "--out", str(folder / "run")]
    assert main(command) == 0
    return folder


def mistake(capsys, *words):
    """The one line that a mistaken command prints."""
    try:
        assert main([str(word) for word in words]) == 2
    except SystemExit as exit:
        assert exit.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    assert f"seqmix {command}" in capsys.readouterr().out


def test_help_names_every_command_and_the_keys_of_a_recipe(capsys):
    for words, expected in ((["--help"], COMMANDS), (["train", "--keys"], ["--data.files"])):
        with pytest.raises(SystemExit):
            main(words)
        out = capsys.readouterr().out
        assert all(word in out for word in expected)


README = (Path(__file__).parents[1] / "README.md").read_text()
SHOWN = [
    shlex.split(line, comments=True) for line in re.findall(r"^    seqmix (.*)$", README, re.M)
]


def test_the_readme_shows_every_command_but_the_quickstart_of_make():
    assert {words[0] for words in SHOWN} >= {*COMMANDS} - {"quickstart"}


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_the_commands_of_the_readme_are_understood(words):
    arguments, rest = cli._parser().parse_known_args(words)
    assert not rest or arguments.takes_overrides
    if arguments.takes_overrides:
        load_recipe("tiny", rest)


def test_train_takes_options_over_the_recipe(folder):
    assert read_log(folder / "run")[-1]["step"] == 5
    assert json.loads((folder / "run/results.json").read_text())["steps"] == 5


@pytest.mark.slow
def test_quickstart_compares_two_models_and_streams_a_sample(tmp_path, capsys):
    options = ["--steps", "3", "--warmup_steps", "1", "--sequence_length", "64"]
    options += ["--data.vocab_size", "300", "--data.cache", str(tmp_path / "cache")]
    words = ["quickstart", "--out", str(tmp_path / "out"), *options, "--model.hidden_size", "32"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out and PROMPT.strip() in out
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["name"] for row in results["rows"]] == list(RECIPES)
    assert all(0 < row["bits_per_byte"] < 8 for row in results["rows"])
    assert (tmp_path / "out/loss.png").exists()
    for name in RECIPES:
        assert (tmp_path / "out" / name / "model.safetensors").exists()
    assert "--overwrite" in mistake(capsys, *words)
    bad = ["quickstart", "--out", str(tmp_path / "bad"), *options, "--model.hidden_size", "33"]
    assert main(bad) == 2
    assert re.search(
        "failed: seqmix train: .*hidden_size", capsys.readouterr().err.splitlines()[-1]
    )


def test_evaluate_reads_what_the_recipe_held_out_and_writes_json(folder, capsys):
    assert main(["evaluate", str(folder / "run"), "--window", "32"]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    result = json.loads((folder / "run/evaluation.json").read_text())
    held_out = runs.documents()[19:20]  # every 20th document
    assert result["perplexity"]["bytes"] == sum(len(t.encode()) for t in held_out)
    assert result["files"] == "held out by its recipe" and result["versions"]["torch"]


def test_generate_streams_the_text_that_it_returns(folder, capsys):
    out = folder / "sample.json"
    words = ["generate", str(folder / "run"), "--max-new-tokens", "12", "--out", str(out)]
    assert main([*words, "--prompt", "the whale"]) == 0
    text = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert text.startswith("the whale") and result["text"].strip() in text
    assert main([*words, "--prompt", "the whale"]) == 0
    assert capsys.readouterr().out == text
    assert main([*words, "--temperature", "0"]) == 0


def test_bench_prints_one_json_line_last(capsys):
    assert main(["bench", "attention", "--length", "32", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["operation"] for row in result["rows"]] == ["sdpa", "attention"]
    assert all(row["forward_ms"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert result["shape"]["length"] == 32 and result["machine"]["processors"]


def test_doctor_says_what_runs_here(tmp_path, capsys):
    assert main(["doctor", "--out", str(tmp_path / "doctor.json")]) == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["implementations"]["attention"]["reference"] == "runs"
    assert found["implementations"]["attention"]["torch"] == "runs"
    assert found["versions"]["torch"] in capsys.readouterr().out


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "none.yaml"], "none.yaml"),
        (["train", "none"], "nothing bundled under the name 'recipes/none.yaml'"),
        (["train", "RECIPE", "--stepz", "3"], "unknown key 'stepz'; did you mean 'steps'?"),
        (["train", "RECIPE", "--steps", "few"], "steps must be int, got 'few'"),
        (["train", "RECIPE", "--model.mixers", "moth"], "unknown mixer 'moth'; known are path"),
        (["train", "RECIPE", "--model.hiden_size", "8"], "unknown key 'hiden_size'"),
        (["train", "RECIPE", "--data.files", "none.txt"], "no text file at 'none.txt'"),
        (["train", "RECIPE", "--out", "RUN"], "holds a run; --resume continues it"),
        (["train", "RECIPE", "--initial_model", "./none"], "no folder ./none"),
        (["train"], "the following arguments are required: recipe"),
        (["evaluate", "./none"], "no folder ./none"),
        (["evaluate", "RUN", "--tasks", "ruler"], "unknown task 'ruler'; known are perplexity"),
        (["evaluate", "RUN", "--files", "none.txt"], "no text file at 'none.txt'"),
        (["evaluate", "RUN", "--window", "0"], "need 1 <= stride <= window"),
        (["evaluate", "RUN", "--windo", "3"], "unknown argument '--windo'"),
        (["evaluate", "CACHE"], "has no recipe.yaml: name the text with --files"),
        (["generate", "./none"], "no folder ./none"),
        (["generate", "FOLDER"], "cannot read the model"),
        (["generate", "RUN", "--temperature", "-1"], "temperature must be at least 0, got -1"),
        (["generate", "RUN", "--temperature", "nan"], "temperature must be at least 0, got nan"),
        (["generate", "RUN", "--top-p", "2"], "top_p must be in (0, 1], got 2"),
        (["generate", "RUN", "--top-p", "0"], "top_p must be in (0, 1], got 0"),
        (["bench", "moth"], "unknown operation 'moth'; known are attention"),
        (["bench", "path", "--length", "-1"], "length must be at least 1, got -1"),
        (["bench", "path", "--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["bench", "path", "--threads", "-1"], "threads must be at least 1, got -1"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "the following arguments are required"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, capsys, words, message):
    names = {"RECIPE": folder / "recipe.yaml", "RUN": folder / "run"}
    names |= {"FOLDER": folder, "CACHE": folder / "cache"}
    line = mistake(capsys, *(names.get(word, word) for word in words))
    assert line.startswith("seqmix") and message in line


@pytest.mark.parametrize(
    ("more", "message"),
    [(-1, "it has no place for model.layers."), (1, "it lacks model.layers.")],
)
def test_weights_that_do_not_fit_their_configuration_are_refused(
    folder, tmp_path, capsys, more, message
):
    out = tmp_path / "run"
    shutil.copytree(folder / "run", out)
    values = json.loads((out / "config.json").read_text())
    values["num_hidden_layers"] += more
    (out / "config.json").write_text(json.dumps(values))
    assert f"its weights do not fit its config.json, {message}" in mistake(capsys, "generate", out)


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_an_unreadable_checkpoint_is_one_line_and_untouched(folder, tmp_path, capsys, damage):
    out = tmp_path / "run"
    shutil.copytree(folder / "run", out)
    name = {"weights": "model.safetensors", "config": "config.json"}[damage]
    (out / name).write_bytes((out / name).read_bytes()[:50])
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for words in (["generate", out], ["evaluate", out]):
        assert f"cannot read the model {out}" in mistake(capsys, *words)
    recipe = ["train", folder / "recipe.yaml", "--model", "{}", "--initial_model", out]
    assert str(out) in mistake(capsys, *recipe, "--out", tmp_path / "new")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert not (tmp_path / "new").exists()
