"""Text in, packed token rows out.

    prepared = prepare(DataOptions(files=["books/*.txt"], vocab_size=4096))
    rows = PackedRows(prepared.train, sequence_length=1024, seed=0, length=steps * batch_size)
    batch = pack([rows[0], rows[1]])        # input_ids [1, 2T], cu_seqlens [N+1], labels [1, 2T]

Text is read once and kept on disk as one stream of token ids,

    [bos] document [eos] [bos] document [eos] ...

of which a row is T consecutive tokens. Documents keep their borders: `cu_seqlens` starts a segment
at every document and at every row, and the first token of a segment is nobody's target. Row `i` is
a function of (seed, i) alone: a run resumes by counting, and loader workers or processes do not
change what is read. There is no padding, hence no label is masked for looking like it.
"""

import glob
import gzip
import hashlib
import json
import lzma
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
from filelock import FileLock
from torch.utils.data import Dataset

from seqmix.report import console, write_json
from seqmix.tokenizer import encode, load_tokenizer, train_tokenizer

SUFFIXES = (".txt", ".jsonl", ".txt.xz", ".jsonl.xz", ".txt.gz", ".jsonl.gz")
FLUSH = 1_000_000  # characters tokenised at once: enough for all cores, small beside memory
FORMAT = 1  # of the files in the cache


@dataclass
class DataOptions:
    """Where text comes from and how it becomes tokens."""

    files: Annotated[
        list[str],
        "text files, folders or globs (.txt, .jsonl, also .xz or .gz); bundled:NAME is one of ours",
    ] = field(default_factory=list)
    dataset: Annotated[str | None, "instead of files: a Hugging Face dataset, streamed"] = None
    dataset_config: Annotated[str | None, "its configuration"] = None
    dataset_split: Annotated[str, "its split"] = "train"
    text_field: Annotated[str, "the field of a .jsonl line or dataset row that holds the text"] = (
        "text"
    )
    separator: Annotated[str, "regular expression between the documents of a .txt file"] = "\0"
    held_out: Annotated[float, "share of the text kept for validation"] = 0.05
    held_out_files: Annotated[list[str], "validation text, instead of a share"] = field(
        default_factory=list
    )
    max_tokens: Annotated[
        int | None, "stop reading after so many; a dataset stops at what the run needs"
    ] = None
    tokenizer: Annotated[str | None, "folder or name; none: one is trained on the text"] = None
    vocab_size: Annotated[int, "pieces of a trained tokenizer"] = 4096
    cache: Annotated[str, "folder that keeps token files between runs"] = "~/.cache/seqmix"

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"data: held_out must be in [0, 1), got {self.held_out}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"data: max_tokens must be at least 1, got {self.max_tokens}")
        try:
            re.compile(self.separator)
        except re.error as error:
            raise ValueError(
                f"data: separator must be a regular expression, got {self.separator!r}: {error}"
            ) from error


def bundled(name: str) -> Path:
    """Return the path of a file that ships with the project (`data/...`, `recipes/...`)."""
    here = Path(__file__).resolve().parent
    for root in (here / "bundled", here.parents[1]):
        if (root / name).is_file():
            return root / name
    raise FileNotFoundError(f"data: nothing bundled under the name {name!r}")


# ------------------------------------------------------------------------------------------ text


def read_documents(options: DataOptions) -> Iterator[str]:
    """Yield every non-empty document of `options`, always in the same order."""
    if bool(options.files) == bool(options.dataset):
        raise ValueError("data: give either files or dataset")
    documents = _stream(options) if options.dataset else _read_files(options.files, options)
    return (text for text in documents if text)


def split_documents(options: DataOptions) -> Iterator[tuple[str, bool]]:
    """Yield (document, held_out): documents n, 2n, ... are held out, n = 1 / share.

    Fewer than n documents each give their last part instead. With `held_out_files`, or a share of
    zero, no document of the main text is held out.
    """
    documents = read_documents(options)
    if options.held_out_files:
        yield from ((text, True) for text in _read_files(options.held_out_files, options) if text)
    if options.held_out_files or not options.held_out:
        yield from ((text, False) for text in documents)
        return
    period = round(1 / options.held_out)
    first = list(islice(documents, period))
    if len(first) == period:
        for number, text in enumerate(chain(first, documents), 1):
            yield text, number % period == 0
        return
    for text in first:
        cut = int(len(text) * (1 - options.held_out))
        cut = text.rfind("\n", 0, cut) + 1 or cut
        yield text[:cut], False
        yield text[cut:], True


def held_out_documents(options: DataOptions) -> list[str]:
    """Return the held-out documents."""
    return [text for text, held_out in split_documents(options) if held_out]


def _expand(patterns: list[str]) -> list[Path]:
    paths: list[Path] = []
    for pattern in patterns:
        if pattern.startswith("bundled:"):
            paths.append(bundled("data/" + pattern.removeprefix("bundled:")))
            continue
        path = Path(pattern).expanduser()
        if path.is_dir():
            found = [p for p in path.rglob("*") if p.name.endswith(SUFFIXES)]
        else:
            found = (
                [path]
                if path.is_file()
                else [Path(p) for p in glob.glob(str(path), recursive=True)]
            )
        if not found:
            raise FileNotFoundError(f"data: no text file at {pattern!r}")
        paths += sorted(found)
    return paths


def _open(path: Path) -> IO[str]:
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    return opener(path, "rt", encoding="utf-8")  # type: ignore[return-value]


def _read_files(patterns: list[str], options: DataOptions) -> Iterator[str]:
    for path in _expand(patterns):
        with _open(path) as file:
            try:
                if ".jsonl" in path.suffixes:
                    yield from (
                        _text_of(json.loads(line), options, path) for line in file if line.strip()
                    )
                else:
                    yield from re.split(options.separator, file.read())
            except json.JSONDecodeError as error:
                raise ValueError(f"data: {path} is not JSON lines: {error}") from error
            except (UnicodeDecodeError, EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
                raise ValueError(f"data: cannot read {path}: {error}") from error


def _text_of(row: Any, options: DataOptions, source: object) -> str:
    try:
        return row[options.text_field]
    except (KeyError, TypeError):
        fields = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"data: {source} has no text_field {options.text_field!r}, only {fields}"
        ) from None


def _stream(options: DataOptions) -> Iterator[str]:
    from datasets import load_dataset

    name, config, split = options.dataset, options.dataset_config, options.dataset_split
    try:
        rows = load_dataset(name, config, split=split, streaming=True)  # type: ignore[arg-type]
    except Exception as error:  # the hub's errors have no common base
        raise ValueError(f"data: cannot open dataset {name!r}: {error}") from error
    return (_text_of(row, options, name) for row in rows)


# ----------------------------------------------------------------------------------- token files


@dataclass(frozen=True)
class TokenStream:
    """Token ids on disk, and the offset of each document's first token.

    Opened anew at each access: cheap, safe in loader workers, and no file is held open.
    """

    path: Path
    dtype: str
    tokens: int
    documents: int
    bytes: int

    def ids(self, start: int, stop: int) -> torch.Tensor:
        """Return tokens `start` to `stop` as int64."""
        stream = np.memmap(self.path, dtype=self.dtype, mode="r")
        return torch.from_numpy(stream[start:stop].astype(np.int64))

    def starts(self, start: int, stop: int) -> list[int]:
        """Return the offsets in [start, stop) at which a document starts."""
        offsets = np.load(self.path.with_suffix(".starts.npy"), mmap_mode="r")
        first, last = np.searchsorted(offsets, (start, stop))
        return offsets[first:last].tolist()


@dataclass(frozen=True)
class Prepared:
    """A tokenizer, and the training and held-out text as tokens."""

    tokenizer: Any
    train: TokenStream
    held_out: TokenStream


def prepare(options: DataOptions, needed_tokens: int | None = None) -> Prepared:
    """Tokenise the text once into the cache folder and open it.

    `needed_tokens` bounds what is read of a dataset when `max_tokens` does not. Any number of
    processes may call this at once: one works, the others wait.
    """
    limit = options.max_tokens or (needed_tokens if options.dataset else None)
    folder = Path(options.cache).expanduser() / "tokens" / _key(options, limit)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            partial = Path(f"{folder}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _build(options, limit, partial)
            partial.rename(folder)
    meta = json.loads((folder / "streams.json").read_text())
    streams = {name: TokenStream(folder / f"{name}.bin", **facts) for name, facts in meta.items()}
    return Prepared(load_tokenizer(str(folder / "tokenizer")), **streams)


def _key(options: DataOptions, limit: int | None) -> str:
    facts: dict[str, Any] = {"format": FORMAT, "limit": limit, **asdict(options)}
    for name in ("cache", "max_tokens"):
        facts.pop(name)
    paths = _expand([*options.files, *options.held_out_files])
    if options.tokenizer and Path(options.tokenizer).is_dir():
        paths += sorted(Path(options.tokenizer).glob("*.json"))
    facts["stat"] = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _build(options: DataOptions, limit: int | None, folder: Path) -> None:
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        train_text = (text for text, held_out in split_documents(options) if not held_out)
        tokenizer = train_tokenizer(train_text, options.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    train, held_out = (_Writer(folder / f"{name}.bin", tokenizer) for name in ("train", "held_out"))
    with console.status("reading text") as status:
        for text, is_held_out in split_documents(options):
            (held_out if is_held_out else train).add(text)
            status.update(f"reading text: {train.documents:,} documents, {train.tokens:,} tokens")
            if limit and train.tokens >= limit:
                break
    write_json(folder / "streams.json", {"train": train.close(), "held_out": held_out.close()})


class _Writer:
    """Appends tokenised documents to a token stream."""

    def __init__(self, path: Path, tokenizer: Any):
        self.path, self.tokenizer, self.file = path, tokenizer, path.open("wb")
        self.dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
        self.waiting: list[str] = []
        self.starts: list[int] = []
        self.characters = self.tokens = self.documents = self.bytes = 0

    def add(self, text: str) -> None:
        self.waiting.append(text)
        self.documents += 1
        self.characters += len(text)
        if self.characters >= FLUSH:
            self.flush()

    def flush(self) -> None:
        eos = self.tokenizer.eos_token_id
        for ids in encode(self.tokenizer, self.waiting) if self.waiting else []:
            ids = ids if len(ids) > 1 and ids[-1] == eos else [*ids, eos]
            np.asarray(ids, self.dtype).tofile(self.file)
            self.starts.append(self.tokens)
            self.tokens += len(ids)
        self.bytes += sum(len(text.encode()) for text in self.waiting)
        self.waiting, self.characters = [], 0

    def close(self) -> dict[str, Any]:
        self.flush()
        self.file.close()
        np.save(self.path.with_suffix(".starts.npy"), np.asarray(self.starts, np.int64))
        return {name: getattr(self, name) for name in ("dtype", "tokens", "documents", "bytes")}


# ------------------------------------------------------------------------------------- packed rows


class PackedRows(Dataset):
    """Rows of T tokens, by default one pass in order.

    With a `seed` every pass has an order of its own; `length` rows in all.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        seed: int | None = None,
        length: int | None = None,
    ):
        self.stream, self.sequence_length, self.seed = stream, sequence_length, seed
        self.rows = stream.tokens // sequence_length
        self.length = self.rows if length is None else length
        self.order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        if not self.rows and self.length:
            raise ValueError(
                f"data: the text has {stream.tokens} tokens, less than one row of {sequence_length}"
            )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `input_ids` [T] and `starts`, where segments start in the row."""
        if not 0 <= index < self.length:
            raise IndexError(index)
        epoch, row = divmod(index, self.rows)
        if self.seed is not None:
            row = int(self._order(self.seed, epoch)[row])
        start = row * self.sequence_length
        stop = start + self.sequence_length
        inner = [offset - start for offset in self.stream.starts(start + 1, stop)]
        return {"input_ids": self.stream.ids(start, stop), "starts": [0, *inner]}

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if self.order[0] != epoch:
            self.order = epoch, np.random.default_rng((seed, epoch)).permutation(self.rows)
        return self.order[1]


def pack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Lay rows end to end: `input_ids` [1, total], `cu_seqlens` [N+1], `labels` [1, total].

    Labels are not shifted (the model shifts them). The first of each segment is -100: nothing
    before it belongs to its document.
    """
    borders, total = [], 0
    for row in rows:
        borders += [total + start for start in row["starts"]]
        total += len(row["input_ids"])
    input_ids = torch.cat([row["input_ids"] for row in rows])[None]
    labels = input_ids.clone()
    labels[0, borders] = -100
    cu_seqlens = torch.tensor([*borders, total], dtype=torch.int32)
    return {"input_ids": input_ids, "cu_seqlens": cu_seqlens, "labels": labels}
