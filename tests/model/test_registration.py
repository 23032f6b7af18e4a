"""`import seqmix` registers the model, whatever is imported before or after it."""

import subprocess
import sys

import pytest

ORDERS = {
    "auto_after": "import seqmix; from transformers import AutoConfig, AutoModelForCausalLM",
    "auto_before": "from transformers import AutoConfig, AutoModelForCausalLM; import seqmix",
    "a_model_first": "import seqmix; from transformers import LlamaForCausalLM",
    "inner_module_first": "import seqmix; from transformers.models.mamba2 import modeling_mamba2",
    "layers_first": "import seqmix; import transformers.modeling_layers",
    "trainer_first": "import transformers, seqmix; from transformers import Trainer",
    "our_model_first": "import seqmix.model.modeling",
    "our_config_first": "from seqmix.model import SeqmixConfig",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_auto_classes_know_the_model(order):
    code = (
        f"{ORDERS[order]}\n"
        "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"
        "sizes = dict(hidden_size=16, num_heads=2, num_hidden_layers=1, vocab_size=9)\n"
        "config = AutoConfig.for_model('seqmix', **sizes)\n"
        "print(type(AutoModelForCausalLM.from_config(config)).__name__)\n"
        "print(type(AutoModel.from_config(config)).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.split() == ["SeqmixForCausalLM", "SeqmixModel"], run.stderr
