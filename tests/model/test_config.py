"""The configuration: mistakes are named in one line, and what is saved comes back."""

import json

import pytest
from transformers import AutoConfig

from seqmix.model import SeqmixConfig, SeqmixForCausalLM
from tests.model.models import MODELS, config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 3}, "SeqmixConfig: unknown key 'num_layers'; allowed are mixers, "),
        ({"temperature": 0.5}, "SeqmixConfig: unknown key 'temperature'"),
        ({"mixers": ["pth"]}, "mixers: unknown mixer 'pth'; known are path, "),
        ({"mixers": []}, "SeqmixConfig: mixers must name at least one mixer"),
        ({"mixer_options": {"pth": {}}}, "mixers: unknown mixer 'pth'; known are path, "),
        (
            {"mixers": ["attention"], "mixer_options": {"attention": {"positions": "rope"}}},
            "mixers: attention has no option 'positions'; it has ",
        ),
        ({"mixer_options": {"9": {}}}, "SeqmixConfig: mixer_options names layer 9, but there"),
        ({"mixer_options": {"path": 3}}, "SeqmixConfig: mixer_options of 'path' must be a dict"),
        ({"hidden_size": 2.5}, "SeqmixConfig: hidden_size must be a positive integer, got 2.5"),
        ({"num_heads": 0}, "SeqmixConfig: num_heads must be a positive integer, got 0"),
        ({"intermediate_size": -1}, "SeqmixConfig: intermediate_size must be None, 0 or"),
        ({"num_kv_heads": 0}, "SeqmixConfig: num_kv_heads must be None or a positive integer"),
        ({"head_dim": "a"}, "SeqmixConfig: head_dim must be None or a positive integer, got 'a'"),
        ({"norm_eps": "a"}, "SeqmixConfig: norm_eps must be a number >= 0, got 'a'"),
        ({"initializer_range": -1}, "SeqmixConfig: initializer_range must be a number >= 0"),
        ({"mixers": 5}, "SeqmixConfig: mixers must be a list of names, got 5"),
        ({"mixer_options": 5}, "SeqmixConfig: mixer_options must be a dict or None, got 5"),
        (
            {"mixer_options": {"path": {"window": "a"}}},
            "mixers: window of path must be a positive integer, got 'a'",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(ValueError, match=".") as error:
        SeqmixConfig(**arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_mixers_are_tiled_and_saved_expanded(tmp_path):
    made = SeqmixConfig(mixers=["path", "path", "attention"], num_hidden_layers=5)
    assert made.mixers == ["path", "path", "attention", "path", "path"]
    assert SeqmixConfig(mixers="fox", num_hidden_layers=2).mixers == ["fox", "fox"]
    made.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mixers"] == made.mixers


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back(name, tmp_path):
    made = config(name, tie_word_embeddings=False, num_kv_heads=1)
    made.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, SeqmixConfig)
    drop = {"transformers_version", "_name_or_path"}
    assert {k: v for k, v in again.to_dict().items() if k not in drop} == {
        k: v for k, v in made.to_dict().items() if k not in drop
    }


def test_keys_of_the_library_are_no_mistakes():
    made = SeqmixConfig(
        architectures=["SeqmixForCausalLM"],
        attn_implementation="sdpa",
        auto_map={},
        dtype="bfloat16",
        model_type="seqmix",
        num_labels=3,
        output_attentions=False,
        torch_dtype="bfloat16",
        transformers_version="5.5.0",
        quantization_config={},
    )
    assert made.num_labels == 3
    assert made.num_attention_heads == made.num_heads


def test_a_layer_may_have_options_of_its_own():
    options = {"attention": {"position": "nope", "qk_norm": True}, 1: {"position": "alibi"}}
    made = config("rope", mixer_options=options)
    assert made.layer_options(0) == {"position": "nope", "qk_norm": True}
    assert made.layer_options(1) == {"position": "alibi", "qk_norm": True}
    layers = SeqmixForCausalLM(made).model.layers
    assert [layer.mixer.position for layer in layers] == ["nope", "alibi"]


def test_the_feed_forward_follows_the_mixer_and_the_size():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": 9}
    hybrid = SeqmixForCausalLM(SeqmixConfig(mixers=["palimpsa_m", "path"], **sizes))
    assert [layer.mlp is None for layer in hybrid.model.layers] == [True, False]
    assert hybrid.model.layers[1].mlp.up_proj.out_features == 128  # 8/3 * 48, a multiple of 64
    none = SeqmixForCausalLM(SeqmixConfig(mixers=["path"], intermediate_size=0, **sizes))
    assert all(layer.mlp is None for layer in none.model.layers)


def test_layers_and_mixers_must_agree():
    made = config("rope")
    made.num_hidden_layers = 3
    with pytest.raises(ValueError, match="config.mixers names 2 layers, num_hidden_layers is 3"):
        SeqmixForCausalLM(made)
