"""Saving, loading, tying and initialising: what was saved is what comes back, to the bit."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from seqmix.layers.common import RMSNorm
from seqmix.model import SeqmixForCausalLM, SeqmixModel
from tests.model.models import MIXERS, MODELS, config, model, tokens


def tied(made: SeqmixForCausalLM) -> bool:
    return made.lm_head.weight.data_ptr() == made.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tie", [True, False])
def test_what_is_saved_comes_back_to_the_bit(name, tie, tmp_path):
    made, ids = model(name, tie_word_embeddings=tie), tokens(2, 9)
    made.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in file) != tie
    random = torch.get_rng_state()
    for again in (
        SeqmixForCausalLM.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert isinstance(again, SeqmixForCausalLM) and not again.training
        assert tied(again) == tie
        assert all(torch.equal(again.state_dict()[key], x) for key, x in file.items())
        assert torch.equal(again(ids).logits, made(ids).logits)
    assert torch.equal(torch.get_rng_state(), random)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert isinstance(trunk, SeqmixModel)
    assert torch.equal(trunk(ids).last_hidden_state, made.model(ids).last_hidden_state)


@pytest.mark.parametrize("name", ["palimpsa_d", "palimpsa_m", "lattice_1", "path_fox"])
def test_a_missing_weight_is_initialised_and_the_others_stay(name, tmp_path):
    made = model(name)
    weights = made.state_dict()
    gone = [key for key in weights if "layers.0.mixer" in key][0]
    kept = {key: x for key, x in weights.items() if key not in (gone, "lm_head.weight")}
    made.save_pretrained(tmp_path, state_dict=kept)
    again = SeqmixForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[key], x) for key, x in kept.items())
    assert again[gone].isfinite().all() and not torch.equal(again[gone], weights[gone])


@pytest.mark.parametrize("name", MODELS)
def test_a_model_built_on_meta_is_initialised_like_another(name):
    with torch.device("meta"):
        made = SeqmixForCausalLM(config(name))
    assert all(p.is_meta for p in made.parameters())
    made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(float("nan"))
    torch.manual_seed(3)
    made.init_weights()
    assert tied(made)
    other = SeqmixForCausalLM(config(name))
    for (key, a), (_, b) in zip(made.named_parameters(), other.named_parameters(), strict=True):
        assert a.isfinite().all(), key
        if a.numel() > 60:
            assert 0.5 < a.std() / b.std() < 2 or a.std() == b.std() == 0, key
    assert made(tokens(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize("name", ["palimpsa_d", "palimpsa_m"])
def test_time_steps_start_where_mamba2_starts_them(name):
    made = SeqmixForCausalLM(config(name))
    for layer in made.model.layers:
        step = torch.nn.functional.softplus(layer.mixer.dt_bias)
        assert (step > 0.9e-3).all() and (step < 1.1e-1).all() and step.std() > 0


def test_initializer_range_reaches_every_matrix():
    made = SeqmixForCausalLM(config("rope", initializer_range=0.5))
    for key, parameter in made.named_parameters():
        if parameter.ndim == 2:
            assert 0.4 < parameter.std() < 0.6, key
    assert all((m.weight == 1).all() for m in made.modules() if isinstance(m, RMSNorm))


@pytest.mark.parametrize("name", MIXERS)
def test_gates_decays_and_priors_stay_in_float32(name, tmp_path):
    made, ids = model(name), tokens(1, 7)
    exact = made.state_dict()
    special = {
        key
        for key in exact
        for kept in made.model.layers[0].mixer.no_decay
        if ".mixer." in key and key.endswith(kept)
    }
    assert special or name in ("path", "path_fox", "rope", "nope", "alibi", "fox")
    made.save_pretrained(tmp_path)
    for cast in (
        SeqmixForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        SeqmixForCausalLM.from_pretrained(tmp_path).to(torch.bfloat16),
        SeqmixForCausalLM.from_pretrained(tmp_path).bfloat16(),
        AutoModelForCausalLM.from_config(made.config, dtype=torch.bfloat16),
    ):
        read = cast.name_or_path != ""
        for key, x in cast.state_dict().items():
            assert x.dtype == (torch.float32 if key in special else torch.bfloat16), key
            assert not read or key not in special or torch.equal(x, exact[key])
        assert cast(ids).logits.isfinite().all()
    assert made.double().state_dict()[next(iter(special), "lm_head.weight")].dtype == torch.float64


def test_resized_embeddings_stay_tied():
    made = model("rope")
    made.resize_token_embeddings(40)
    assert tied(made) and made(tokens(1, 3)).logits.shape == (1, 3, 40)
    assert made(tokens(1, 3), labels=tokens(1, 3)).loss.isfinite()


FRESH = """
import sys
import seqmix
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder = sys.argv[1]
print(type(AutoConfig.from_pretrained(folder)).__name__)
print(type(AutoModel.from_pretrained(folder)).__name__)
print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
"""


def test_a_saved_folder_loads_in_a_fresh_process(tmp_path):
    model("rope").save_pretrained(tmp_path)
    run = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", FRESH, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["SeqmixConfig", "SeqmixModel", "SeqmixForCausalLM"]


def test_the_package_alone_loads_nothing():
    script = (
        "import sys, seqmix\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from seqmix import debug_checks\n"
        "with debug_checks(): pass\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert AutoConfig.for_model("seqmix", mixers=["fox"]).mixers[0] == "fox"
