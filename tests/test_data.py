import gzip
import json
import lzma

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqmix import data
from seqmix.data import (
    DataOptions,
    PackedRows,
    held_out_documents,
    pack,
    prepare,
    read_documents,
    split_documents,
)
from seqmix.tokenizer import END_OF_TEXT, encode, load_tokenizer, locate, train_tokenizer
from tests import runs


def options(folder, **changes):
    defaults = {"vocab_size": 300, "cache": str(folder / "cache"), "held_out": 0.0}
    return DataOptions(**{"files": [str(runs.write_text(folder))], **defaults, **changes})


# ---------------------------------------------------------------------------------------- text


def test_every_kind_of_file_gives_its_documents_in_the_order_of_the_names(tmp_path):
    (tmp_path / "a.txt").write_text("one\0two")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n\n{"text": "four"}\n')
    with lzma.open(tmp_path / "c.txt.xz", "wt") as file:
        file.write("five")
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write('{"text": "six"}')
    (tmp_path / "e.csv").write_text("not text")
    expected = ["one", "two", "three", "four", "five", "six"]
    assert list(read_documents(DataOptions(files=[str(tmp_path)]))) == expected
    assert list(read_documents(DataOptions(files=[str(tmp_path / "[ab].*")]))) == expected[:4]


def test_a_separator_is_a_regular_expression_that_may_keep_its_match(tmp_path):
    (tmp_path / "book.txt").write_text("CHAPTER 1\nA\nCHAPTER 2\nB")
    book = DataOptions(files=[str(tmp_path / "book.txt")], separator=r"\n(?=CHAPTER)")
    assert list(read_documents(book)) == ["CHAPTER 1\nA", "CHAPTER 2\nB"]


def test_a_dataset_is_streamed_and_gives_what_its_files_give(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    runs.write_text(tmp_path)
    streamed = DataOptions(dataset=str(tmp_path))
    assert list(read_documents(streamed)) == runs.documents()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"files": []}, "give either files or dataset"),
        ({"dataset": "a/b"}, "give either files or dataset"),
        ({"text_field": "body"}, r"has no text_field 'body', only \['text'\]"),
        ({"files": ["bundled:none.txt"]}, "nothing bundled under the name"),
        ({"files": ["nowhere/*.txt"]}, "no text file at 'nowhere"),
    ],
)
def test_text_that_cannot_be_read_is_named(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        list(read_documents(options(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", b"{"), ("a.txt", b"\xff\xfe\xfd"), ("a.txt.xz", b"no"), ("a.txt.gz", b"no")],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        list(read_documents(DataOptions(files=[str(tmp_path / name)])))


def test_every_nth_document_is_held_out(tmp_path):
    parts = list(split_documents(options(tmp_path, held_out=0.125)))
    assert [text for text, _ in parts] == runs.documents()
    assert [n for n, (_, held_out) in enumerate(parts) if held_out] == [7, 15, 23]


def test_few_documents_each_give_their_end_at_a_line(tmp_path):
    text = "".join(f"line {n}\n" for n in range(100))
    (tmp_path / "one.txt").write_text(text)
    one = DataOptions(files=[str(tmp_path / "one.txt")], held_out=0.1)
    (head, _), (tail, held_out) = split_documents(one)
    assert head + tail == text and held_out and tail.startswith("line ")
    assert 0.05 < len(tail) / len(text) < 0.15


def test_held_out_files_leave_the_text_whole(tmp_path):
    (tmp_path / "other.txt").write_text("other")
    both = options(tmp_path, held_out=0.5, held_out_files=[str(tmp_path / "other.txt")])
    assert held_out_documents(both) == ["other"]
    assert [text for text, held_out in split_documents(both) if not held_out] == runs.documents()


# ----------------------------------------------------------------------------------- tokenizers


def test_a_trained_tokenizer_gives_back_any_text():
    tokenizer = train_tokenizer(runs.documents(), 300)
    for text in ("the whale", "naïve 鯨 \U0001f40b\t\r\n  x", "".join(map(chr, range(1, 300)))):
        ids = encode(tokenizer, [text])[0]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text


def test_the_word_for_the_end_of_text_inside_a_text_is_text():
    tokenizer = train_tokenizer(runs.documents(), 300)
    ids = encode(tokenizer, [f"a{END_OF_TEXT}b"])[0]
    assert tokenizer.eos_token_id not in ids[1:]
    assert tokenizer.decode(ids[1:]) == f"a{END_OF_TEXT}b"


def test_training_a_tokenizer_twice_gives_the_same_one():
    first, second = (train_tokenizer(runs.documents(), 400).get_vocab() for _ in range(2))
    assert first == second


def test_a_tokenizer_loads_from_its_folder_with_its_bos_habit(tmp_path):
    for bos in (True, False):
        train_tokenizer(runs.documents(), 300, bos=bos).save_pretrained(tmp_path)
        tokenizer = load_tokenizer(str(tmp_path))
        assert (encode(tokenizer, ["whale"])[0][0] == tokenizer.eos_token_id) == bos
        assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("name", ["runs", "./a/b", "/none", "tests/none", "a/b/c", "~/none"])
def test_what_may_be_a_mistyped_path_is_not_looked_up_on_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        locate(name)


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 258, got 100"):
        train_tokenizer(["a"], 100)


# ---------------------------------------------------------------------------------- token files


def test_the_stream_is_every_document_between_bos_and_eos(tmp_path):
    prepared = prepare(options(tmp_path))
    stream, tokenizer = prepared.train, prepared.tokenizer
    ids = stream.ids(0, stream.tokens).tolist()
    starts = stream.starts(0, stream.tokens)
    ends = [*starts[1:], len(ids)]
    texts = [tokenizer.decode(ids[a + 1 : b - 1]) for a, b in zip(starts, ends, strict=True)]
    assert texts == runs.documents()
    assert {ids[a] for a in starts} == {ids[a - 1] for a in starts} == {tokenizer.eos_token_id}
    assert stream.documents == len(texts) and stream.bytes == sum(len(t.encode()) for t in texts)


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path, monkeypatch):
    first = prepare(options(tmp_path)).train
    build = data._build
    monkeypatch.setattr(data, "_build", lambda *_: pytest.fail("tokenised again"))
    assert prepare(options(tmp_path)).train == first
    monkeypatch.setattr(data, "_build", build)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "another text"}))
    assert prepare(options(tmp_path)).train.documents == 1


def test_a_token_file_that_was_not_finished_is_not_taken(tmp_path, monkeypatch):
    build = data._build

    def killed(*arguments):
        build(*arguments)
        (arguments[-1] / "train.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_build", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(options(tmp_path))
    monkeypatch.setattr(data, "_build", build)
    stream = prepare(options(tmp_path)).train
    assert len(stream.ids(0, stream.tokens)) == stream.tokens > 0


def test_reading_stops_at_max_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FLUSH", 100)
    whole = prepare(options(tmp_path)).train.tokens
    part = prepare(options(tmp_path, max_tokens=whole // 3)).train
    assert whole // 3 <= part.tokens < whole // 2


# ---------------------------------------------------------------------------------- packed rows


def row(ids, starts):
    return {"input_ids": torch.tensor(ids), "starts": starts}


def test_rows_are_packed_with_their_borders():
    batch = pack([row([5, 6, 7], [0, 2]), row([8, 9, 5], [0])])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 5]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 3, 6]
    assert batch["labels"].tolist() == [[-100, 6, -100, -100, 9, 5]]


def test_every_eos_is_a_target_though_it_may_be_the_padding(tmp_path):
    prepared = prepare(options(tmp_path))
    prepared.tokenizer.pad_token = prepared.tokenizer.eos_token
    rows = PackedRows(prepared.train, prepared.train.tokens)
    labels = pack([rows[0]])["labels"][0]
    assert (labels == prepared.tokenizer.eos_token_id).sum() == prepared.train.documents


def test_one_pass_reads_every_row_once_and_the_next_in_another_order(tmp_path):
    stream = prepare(options(tmp_path)).train
    ordered = PackedRows(stream, 16)
    shuffled = PackedRows(stream, 16, seed=1, length=2 * ordered.rows)
    key = [tuple(shuffled[i]["input_ids"].tolist()) for i in range(2 * ordered.rows)]
    first, second = key[: ordered.rows], key[ordered.rows :]
    assert first != second
    assert sorted(first) == sorted(second)
    assert sorted(first) == sorted(tuple(r["input_ids"].tolist()) for r in ordered)
    assert torch.equal(
        torch.cat([r["input_ids"] for r in ordered]), stream.ids(0, 16 * ordered.rows)
    )


def test_a_row_knows_where_its_documents_start(tmp_path):
    stream = prepare(options(tmp_path)).train
    starts = [16 * i + s for i, r in enumerate(PackedRows(stream, 16)) for s in r["starts"]]
    rows = stream.tokens // 16
    assert set(starts) == {*range(0, 16 * rows, 16), *stream.starts(0, 16 * rows)}


def test_a_row_depends_on_seed_and_number_alone_and_not_on_workers(tmp_path):
    stream = prepare(options(tmp_path)).train

    def batches(workers, start=0):
        rows = PackedRows(stream, 16, seed=3, length=24)
        subset = torch.utils.data.Subset(rows, range(start, 24))
        loader = DataLoader(subset, batch_size=4, collate_fn=pack, num_workers=workers)
        return [batch["input_ids"] for batch in loader]

    alone = batches(0)
    assert all(map(torch.equal, alone, batches(2)))
    assert all(map(torch.equal, alone[3:], batches(0, start=12)))
    other = PackedRows(stream, 16, seed=4, length=24)
    assert not torch.equal(pack([other[i] for i in range(4)])["input_ids"], alone[0])


def test_text_shorter_than_a_row_is_refused(tmp_path):
    stream = prepare(options(tmp_path)).train
    with pytest.raises(ValueError, match=f"has {stream.tokens} tokens, less than one row of 10000"):
        PackedRows(stream, 10_000, seed=0, length=4)


def test_token_ids_of_a_large_vocabulary_fit(tmp_path, monkeypatch):
    prepared = prepare(options(tmp_path))

    class Large:
        eos_token_id = 70_001

        def __len__(self):
            return 70_002

        def __call__(self, texts, **_):
            return type("Encoded", (), {"input_ids": [[70_000] for _ in texts]})

    writer = data._Writer(tmp_path / "large.bin", Large())
    writer.add("x")
    assert writer.close()["dtype"] == "uint32"
    assert np.fromfile(tmp_path / "large.bin", "uint32").tolist() == [70_000, 70_001]
    assert prepared.train.dtype == "uint16"
