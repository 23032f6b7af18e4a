"""Training: every parameter learns, checkpointing and packing change nothing, the Trainer works."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from seqmix.model import CACHE_NAME, SeqmixForCausalLM
from tests.model.models import MIXERS, MODELS, distance, model, tokens

# Trainer and PEFT use names that the newest transformers deprecates.
OLD_NAMES = "ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"


class Rows(Dataset):
    """The same few rows, with labels."""

    def __init__(self, rows: int, length: int) -> None:
        self.ids = tokens(rows, length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def checkpointing(made: SeqmixForCausalLM, use_reentrant: bool) -> None:
    enable = getattr(made, "activation_checkpointing_enable", None)
    (enable or made.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def gradients(made, **inputs) -> dict[str, torch.Tensor]:
    made.zero_grad()
    made(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in made.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    made, ids = model(name, tie_word_embeddings=False).train(), tokens(2, 12)
    for key, gradient in gradients(made, input_ids=ids, labels=ids).items():
        assert gradient.isfinite().all() and gradient.any(), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("length", [1, 2, 5, 20])
def test_short_rows_train(name, length):
    made, ids = model(name).train(), tokens(2, length)
    for gradient in gradients(made, input_ids=ids, labels=ids).values():
        assert gradient.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_training_and_evaluation_are_one_function(name):
    made, ids = model(name), tokens(2, 33)
    assert torch.equal(made.train()(ids).logits, made.eval()(ids, use_cache=False).logits)
    assert distance(made.eval()(ids, use_cache=True).logits, made(ids).logits) < 1e-6


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_gradient(name, use_reentrant):
    made, ids = model(name).train(), tokens(1, 24)
    assert made.config.use_cache
    inputs = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 5, 5, 16, 24])}
    expected = gradients(made, **inputs)
    checkpointing(made, use_reentrant)
    got = gradients(made, **inputs)
    for key, gradient in got.items():
        assert distance(gradient, expected[key]) < 1e-5, key
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[:, :7] = 0
    padded = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    assert all(g.isfinite().all() for g in gradients(made, **padded).values())


def test_checkpointing_keeps_no_cache_in_training_and_one_in_generation():
    made, ids = model("hybrid").train(), tokens(1, 9)
    cache = made(ids, use_cache=True)[CACHE_NAME]
    checkpointing(made, False)
    assert getattr(made(ids, use_cache=True), CACHE_NAME) is None
    with pytest.raises(ValueError, match="gradient checkpointing cannot go on from a cache"):
        made(ids, **{CACHE_NAME: cache})
    rules = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert made.generate(ids, **rules).tolist() == made.eval().generate(ids, **rules).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_train_like_separate_ones(name):
    made, first, second = model(name).train(), tokens(1, 9), tokens(1, 14)
    labels = torch.cat([first, second], 1)
    number = 8 + 13
    packed = gradients(made, input_ids=labels, labels=labels, cu_seqlens=torch.tensor([0, 9, 23]))
    parts = [
        gradients(made, input_ids=ids, labels=ids, num_items_in_batch=number)
        for ids in (first, second)
    ]
    for key, gradient in packed.items():
        assert distance(gradient, parts[0][key] + parts[1][key]) < 1e-4, key


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_trains(name, dtype):
    made, ids = model(name, initializer_range=0.05).train(), tokens(2, 12)
    exact = made(ids, labels=ids).loss
    with torch.autocast("cpu", dtype):
        loss = made(ids, labels=ids).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) < 0.05 * exact.item()
    assert all(p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("name", MIXERS)
def test_a_bfloat16_model_trains(name):
    made, ids = model(name, initializer_range=0.05).train(), tokens(2, 12)
    exact = made(ids, labels=ids).loss
    made.to(torch.bfloat16)
    loss = made(ids, labels=ids).loss
    loss.backward()
    assert abs(loss.item() - exact.item()) < 0.05 * exact.item()
    assert all(p.grad.isfinite().all() and p.grad.dtype == p.dtype for p in made.parameters())


@pytest.mark.filterwarnings(OLD_NAMES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_trainer_trains_evaluates_and_saves(checkpointed, tmp_path):
    made, rows = model("hybrid").train(), Rows(8, 16)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointed,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    seen = {}

    def accuracy(evaluated) -> dict[str, float]:
        seen["shape"] = evaluated.predictions.shape
        return {"accuracy": 0.5}

    trainer = Trainer(
        made, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=accuracy
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert losses[0] < 10  # a mean over tokens, whatever the accumulation
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] == 0.5 and seen["shape"] == (8, 16, 31)
    trainer.save_model(str(tmp_path / "model"))
    again = SeqmixForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(again.eval()(rows.ids).logits, made.eval()(rows.ids).logits)


@pytest.mark.filterwarnings(OLD_NAMES)
@pytest.mark.parametrize(
    "name",
    [
        "path_fox",
        "palimpsa_d",
        "palimpsa_m",
        "lattice_4",
        "fox",
    ],
)
def test_low_rank_adapters_train_generate_and_merge(name):
    made, ids = model(name), tokens(2, 10)
    before = made(ids).logits
    options = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    adapted = get_peft_model(made, options)
    torch.testing.assert_close(adapted(ids).logits, before)
    checkpointing(adapted, True)
    optimizer = torch.optim.SGD((p for p in adapted.parameters() if p.requires_grad), 0.1)
    adapted.train()
    for _ in range(2):
        optimizer.zero_grad()
        adapted(input_ids=ids, labels=ids).loss.backward()
        missed = [n for n, p in adapted.named_parameters() if p.requires_grad and p.grad is None]
        assert not missed
        optimizer.step()
    adapted.eval()
    logits = adapted(ids).logits
    assert distance(logits, before) > 1e-3
    rules = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = adapted.generate(input_ids=ids, **rules)
    assert cached.tolist() == adapted.generate(input_ids=ids, use_cache=False, **rules).tolist()
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, logits)


@pytest.mark.slow
def test_one_graph_serves_three_lengths():
    mixers = ["path_fox", "palimpsa_m", "palimpsa_d", "lattice", "attention"]
    made = model("lattice_4", mixers=mixers, num_hidden_layers=5)
    torch.compiler.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for length in (16, 21, 40):
        ids = tokens(2, length)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False, "return_logits": True}
        expected, got = (gradients(run, **inputs) for run in (made, compiled))
        for (key, gradient), (_, other) in zip(got.items(), expected.items(), strict=True):
            assert distance(gradient, other) < 1e-5, key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_changes_no_number():
    made, ids = model("path_fox", num_hidden_layers=1), tokens(2, 21)
    torch.compiler.reset()
    compiled = torch.compile(made, fullgraph=True)
    assert distance(compiled(ids, use_cache=False).logits, made(ids).logits) < 1e-5
