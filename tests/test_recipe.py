import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from seqmix.model import SeqmixConfig, SeqmixForCausalLM
from seqmix.recipe import Recipe, describe, load_recipe, save_recipe
from tests import runs

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


def load(tmp_path, text="", *words):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_recipe(path, list(words))


def test_options_go_before_the_file_and_the_file_before_defaults(tmp_path):
    recipe = load(tmp_path, "steps: 500\nseed: 3", "--steps", "700", "--data.vocab_size=512")
    assert (recipe.steps, recipe.seed, recipe.batch_size) == (700, 3, Recipe().batch_size)
    assert recipe.data.vocab_size == 512


def test_lists_flags_numbers_and_model_keys_can_be_options(tmp_path):
    words = "--data.files a.txt b.txt --compile --learning_rate 1e-3 --data.tokenizer null"
    recipe = load(tmp_path, "data: {tokenizer: x}", *words.split(), "--model.hidden_size", "64")
    assert recipe.data.files == ["a.txt", "b.txt"] and recipe.data.tokenizer is None
    assert recipe.compile is True and recipe.learning_rate == 1e-3
    assert recipe.model == {"hidden_size": 64}
    assert load(tmp_path, "", "--data.files", "a.txt").data.files == ["a.txt"]
    mixers = load(tmp_path, "", "--model.mixers", "[path, attention]").model["mixers"]
    assert mixers == ["path", "attention"]


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("stepz: 1", [], "unknown key 'stepz'; did you mean 'steps'?"),
        ("", ["--data.fils", "a"], "unknown key 'data.fils'; did you mean 'data.files'?"),
        ("", ["--zzz", "1"], "unknown key 'zzz'"),
        ("steps: many", [], "steps must be int, got 'many'"),
        ("steps: 1.5", [], "steps must be int, got 1.5"),
        ("compile: 3", [], "compile must be bool, got 3"),
        ("schedule: linear", [], "schedule must be cosine | wsd | constant, got 'linear'"),
        ("data: 3", [], "data must be DataOptions, got 3"),
        ("steps: 0", [], "steps must be at least 1, got 0"),
        ("steps: 5", [], "warmup_steps + decay_steps (100 + 0) exceed steps, 5"),
        ("", ["--steps.a", "1"], "steps must be int, got {'a': 1}"),
        ("steps: 1", ["--steps.a", "1"], "'steps' in 'steps.a' has no keys of its own"),
        ("", ["steps", "1"], "expected --key value, got 'steps'"),
        ("- a", [], "must hold keys and values, got list"),
        ("a: [", [], "is not YAML"),
        ("", ["--name", "[a"], "the value of --name is not YAML"),
        ("steps: .inf", [], "steps must be int, got inf"),
        ("learning_rate: .nan", [], "learning_rate must be float, got nan"),
        ("learning_rate: 0", [], "learning_rate must be positive, got 0.0"),
        ("micro_batch_size: 0", [], "micro_batch_size must be at least 1, got 0"),
        ("warmup_steps: -5", [], "warmup_steps must be at least 0, got -5"),
        ("save_every: -1", [], "save_every must be at least 0, got -1"),
        ("beta1: 1", [], "beta1 must be in [0, 1), got 1.0"),
        ("data: {held_out: 2}", [], "data: held_out must be in [0, 1), got 2.0"),
        ("data: {max_tokens: -1}", [], "data: max_tokens must be at least 1, got -1"),
        ("data: {separator: (}", [], "data: separator must be a regular expression, got '('"),
    ],
)
def test_a_mistake_is_named(tmp_path, text, words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(tmp_path, text, *words)
    assert "\n" not in str(error.value)


def test_a_recipe_that_does_not_exist_is_named(tmp_path):
    for name in ("none", str(tmp_path / "none.yaml")):
        with pytest.raises(FileNotFoundError, match="none"):
            load_recipe(name)


def test_a_saved_recipe_loads_as_it_was(tmp_path):
    recipe = runs.recipe(tmp_path, learning_rate=1e-3, report_to=["wandb"])
    save_recipe(recipe, tmp_path / "saved.yaml")
    assert asdict(load_recipe(tmp_path / "saved.yaml")) == asdict(recipe)


def test_every_key_is_described():
    keys = [key for key, _, _ in describe()]
    assert {"steps", "data.files", "model", "schedule"} <= set(keys)
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_bundled_recipe_builds_a_model_of_the_size_in_its_name(path):
    recipe = load_recipe(path.stem)
    assert recipe.name == path.stem
    vocabulary = 32_000 if recipe.data.tokenizer else recipe.data.vocab_size
    with torch.device("meta"):
        model = SeqmixForCausalLM(SeqmixConfig(vocab_size=vocabulary, **recipe.model))
    if size := re.search(r"-(\d+)m$", path.stem):
        assert 0.9 < model.num_parameters() / (1e6 * int(size[1])) < 1.25


def test_the_two_models_of_the_quickstart_are_of_equal_size_and_read_the_same_tokens():
    first, second = (
        asdict(load_recipe(name)) for name in ("quickstart-path_fox", "quickstart-transformer")
    )
    sizes = []
    for recipe in (first, second):
        with torch.device("meta"):
            config = SeqmixConfig(vocab_size=recipe["data"]["vocab_size"], **recipe["model"])
            sizes.append(SeqmixForCausalLM(config).num_parameters())
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]
    for recipe in (first, second):
        del recipe["name"], recipe["model"]
    assert first == second
