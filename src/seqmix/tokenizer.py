"""Tokenizers: load one, train one, and the one way in which this project calls them.

A document is `tokenizer(text)` followed by EOS. Whether it opens with a BOS is thus the tokenizer's
own habit, kept in its files: training, evaluation and generation cannot differ.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"  # PAD is no EOS: who masks padding keeps every EOS
TRAINING_TEXT = 200_000_000  # characters a tokenizer is trained on at most


def locate(name: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a folder, or for ORG/NAME on the hub.

    What is no such name, or could be a mistyped path, is a FileNotFoundError: nothing goes to the
    network by mistake.
    """
    path = Path(name).expanduser()
    if path.exists():
        return {"pretrained_model_name_or_path": str(path), "local_files_only": True}
    if name.count("/") != 1 or name[0] in "./~" or path.parent.exists():
        raise FileNotFoundError(f"no folder {name} (a name on the hub is ORG/NAME)")
    return {"pretrained_model_name_or_path": name}


def load_tokenizer(name: str) -> Any:
    """Load a Hugging Face tokenizer from a folder, or by name from the hub."""
    from transformers import AutoTokenizer

    where = locate(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"tokenizer: cannot load {name!r}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer: {name!r} has no eos_token, which must end every document")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocab_size: int, bos: bool = True) -> Any:
    """Train a byte-level BPE tokenizer; with `bos` every text opens with the end-of-text piece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + 2
    if vocab_size < smallest:
        raise ValueError(f"tokenizer: vocab_size must be at least {smallest}, got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(_at_most(documents, TRAINING_TEXT), trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{END_OF_TEXT} $A",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
            special_tokens=[(END_OF_TEXT, 0)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT if bos else None,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Tokenise texts, with BOS where the tokenizer adds one; its special words are plain text."""
    return tokenizer(
        texts, split_special_tokens=True, return_attention_mask=False, verbose=False
    ).input_ids


def _at_most(documents: Iterable[str], characters: int) -> Iterator[str]:
    for text in documents:
        yield text
        characters -= len(text)
        if characters < 0:
            return
