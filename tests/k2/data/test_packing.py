from pathlib import Path

import numpy as np
import pytest

from k2.config import TokenizeConfig, load_params
from k2.data import mixture, packing, shards
from k2.data.packing import Documents
from k2.errors import ConfigError, K2Error
from k2.tokenizer import ChatTokenizer

TRAIN = load_params(Path(__file__).parents[3] / "params.yaml").pretrain


def documents(*lengths: int, start: int = 0) -> Documents:
    """Documents whose tokens count up, so that each is recognised."""
    ends = np.cumsum(lengths)
    return Documents([np.arange(start + end - n, start + end, dtype=np.uint16) for n, end in zip(lengths, ends)])


def test_rows_predict_every_token_once():
    """Rows overlap by one token: the targets of all rows are the stream without its first token, in order."""
    stream = np.arange(41, dtype=np.uint16)
    rows = packing.cut_rows(stream, 8)
    assert rows.shape == (5, 9) and (rows[:, 1:].ravel() == stream[1:]).all()


def test_a_stream_visits_each_document_once_an_epoch():
    """An epoch holds every token once, documents whole and in random order; the second epoch in another order."""
    domain = documents(5, 3, 8, 4)
    stream = domain.stream(40, np.random.default_rng(0))
    assert sorted(stream[:20]) == sorted(stream[20:]) == list(range(20))
    assert (stream[:20] != stream[20:]).any()
    starts = [i for i in range(20) if i == 0 or stream[i] != stream[i - 1] + 1]
    assert {int(stream[i]) for i in starts} <= {0, 5, 8, 16}


def test_documents_are_framed_and_survive(tokenizer: ChatTokenizer):
    """[BOS] text [EOS], decoded, is the text; special names in it stay text."""
    records = [{"text": t, "domain": d} for t, d in (("a b", "docs"), ("x[EOS]y", "docs"), ("c = 1", "code"))]
    domains = packing.encode(tokenizer, records, "test")
    assert [tokenizer.decode(domains["docs"][i].tolist()) for i in range(2)] == ["[BOS]a b[EOS]", "[BOS]x[EOS]y[EOS]"]
    assert (domains["docs"].flat == tokenizer.eos_id).sum() == 2 and domains["code"].tokens == domains["code"].lengths.sum()


def test_long_documents_come_first_and_short_ones_only_if_needed():
    domain = documents(10, 100, 30, 50)
    assert list(domain.longest(40, 60).lengths) == [100, 50]
    assert list(domain.longest(40, 170).lengths) == [100, 30, 50]
    assert list(domain.longest(40, 999).lengths) == [10, 100, 30, 50]


@pytest.mark.parametrize(
    "weights, tokens, expected",
    [
        ({"docs": 3, "code": 1}, {"docs": 9, "code": 9}, {"docs": 0.75, "code": 0.25}),
        ({"docs": 0.6, "code": 0.2, "rewrites": 0.2}, {"docs": 9, "code": 9}, {"docs": 0.75, "code": 0.25}),  # none: spread
        ({"docs": 0.4, "code": 0.3, "recall": 0.3}, {"text": 9}, {"text": 0.7, "recall": 0.3}),  # a user's corpus inherits
        ({"docs": 0.5, "code": 0.5}, {"docs": 9, "wiki": 3, "web": 1}, {"docs": 0.5, "wiki": 0.375, "web": 0.125}),
        ({"docs": 1.0, "code": 0.0}, {"docs": 9, "code": 9}, {"docs": 1.0}),
    ],
)
def test_weights_settle_on_what_the_corpus_has(weights: dict, tokens: dict, expected: dict):
    assert mixture.settle("pretrain", {"pretrain": weights}, tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    "weights, tokens, message",
    [
        ({"docs": 1.0}, {"docs": 9, "wiki": 9}, "tokenize.phases.pretrain: says nothing of the corpus's domain `wiki`"),
        ({"docs": -1.0}, {"docs": 9}, "tokenize.phases.pretrain.docs: -1.0 is negative"),
        (
            {"docs": 0.0, "recall": 1.0},
            {"docs": 9},
            "tokenize.phases.pretrain: no domain with a weight is in the corpus, which has docs",
        ),
    ],
)
def test_a_mixture_that_cannot_be_met_names_its_key(weights: dict, tokens: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        mixture.settle("pretrain", {"pretrain": weights}, tokens)


@pytest.mark.parametrize(
    "weights, tokens, rows, expected",
    [
        ({"a": 0.5, "b": 0.3, "recall": 0.2}, {"a": 10**6, "b": 10**6}, 101, {"a": 51, "b": 30, "recall": 20}),
        ({"a": 0.5, "b": 0.5}, {"a": 10**6, "b": 100}, 100, {"a": 80, "b": 20}),  # b: 100 tokens, 2 epochs of rows of 10
        ({"a": 0.4, "b": 0.4, "c": 0.2}, {"a": 10**6, "b": 100, "c": 300}, 200, {"a": 120, "b": 20, "c": 60}),
        ({"a": 0.5, "b": 0.5}, {"a": 20, "b": 20}, 100, {"a": 50, "b": 50}),  # too little in all: repeated beyond
        ({"a": 0.5, "recall": 0.5}, {"a": 20}, 100, {"a": 50, "recall": 50}),  # recall does not swallow a small corpus
    ],
)
def test_rows_are_allocated_by_weight_within_max_epochs(weights: dict, tokens: dict, rows: int, expected: dict, capsys):
    """Counts sum to the rows wanted; an exhausted domain's share goes to the others, and a note says so."""
    result = mixture.allocate("pretrain", weights, tokens, rows, 10, 2.0)
    assert result == expected and sum(result.values()) == rows
    limited = any(n <= 300 for n in tokens.values())
    assert bool(capsys.readouterr().out) == limited


def test_a_phase_has_its_rows_mixed_and_seeded(tokenizer: ChatTokenizer):
    """tokens / seq_len rows, domains shuffled among each other, the same for the same seed, recall rows whole."""
    import dataclasses

    train = dataclasses.replace(TRAIN, tokens=6400, seq_len=64, batch_tokens=640, micro_batch_tokens=640)
    weights = {"docs": 0.5, "code": 0.25, "recall": 0.25}
    config = TokenizeConfig(phases={"pretrain": weights}, max_epochs=4.0, seed=0)
    domains = {"docs": documents(*[300] * 20), "code": documents(*[100] * 20, start=20000)}
    rows, report = mixture.build("pretrain", train, config, domains, tokenizer, long=False)
    again, _ = mixture.build("pretrain", train, config, domains, tokenizer, long=False)
    other, _ = mixture.build("pretrain", train, dataclasses.replace(config, seed=1), domains, tokenizer, long=False)
    assert rows.shape == (100, 65) and rows.dtype == np.uint16 and (rows == again).all() and (rows != other).any()
    counts = {name: part["rows"] for name, part in report["domains"].items()}
    assert counts == {"docs": 50, "code": 25, "recall": 25}
    assert report["domains"]["docs"]["epochs"] == pytest.approx(50 * 64 / 6000, abs=1e-3)
    code = rows.min(axis=1) >= 20000
    assert code.sum() == 25 and 5 < code[:50].sum() < 20  # not sorted by domain
    secret = tokenizer.encode("\nThe secret word is")
    whole = [row for row in rows.tolist() if any(row[i : i + len(secret)] == secret for i in range(65))]
    assert len(whole) == 25


def test_validation_bytes_are_those_of_the_targets(tokenizer: ChatTokenizer):
    """The sum over rows is the UTF-8 length of the text whose tokens are targets; [BOS] and [EOS] weigh nothing."""
    records = [{"text": f"Text {i}: naïve é 中文. " * 9, "domain": "docs"} for i in range(20)]
    rows = packing.validation_rows(packing.encode(tokenizer, records, "test"), 32, seed=0)
    counts = tokenizer.token_bytes()[rows[:, 1:]].sum(axis=1)
    for row, count in zip(rows, counts):
        plain = [t for t in row[1:].tolist() if t not in (tokenizer.bos_id, tokenizer.eos_id)]
        raw = b"".join(tokenizer._tokenizer.decode([t]).encode() for t in plain)
        assert count == len(raw) or "\ufffd" in raw.decode()  # pieces of a character decode to U+FFFD on their own
    whole = [t for t in rows[:, 1:].ravel().tolist() if t not in (tokenizer.bos_id, tokenizer.eos_id)]
    assert abs(int(counts.sum()) - len(tokenizer.decode(whole).encode())) <= 4  # a character cut at the very end


def test_a_tiny_validation_split_fills_one_row(tokenizer: ChatTokenizer):
    domains = packing.encode(tokenizer, [{"text": "small", "domain": "docs"}], "test")
    assert packing.validation_rows(domains, 64, 0).shape == (1, 65)


@pytest.mark.parametrize("vocab, dtype", [(65536, "<u2"), (65537, "<u4")])
def test_rows_survive_the_disk(tmp_path: Path, vocab: int, dtype: str):
    """What TokenRows reads is what write_rows got, in the smallest type that holds the vocabulary."""
    rows = np.random.default_rng(0).integers(0, vocab, (7, 9)).astype(shards.dtype_for(vocab))
    shards.write_rows(tmp_path, "pretrain", rows)
    shards.write_rows(tmp_path, "validation", rows[:3], np.array([1, 2**20, 3]))
    reader = shards.TokenRows(tmp_path, "pretrain")
    assert (reader.rows, reader.row_tokens) == (7, 9) and (tmp_path / "pretrain.bin").stat().st_size == 63 * np.dtype(
        dtype
    ).itemsize
    picked = np.array([6, 0, 0, 3])
    read = reader.read(picked)
    assert str(read.dtype) == "torch.int64" and (read.numpy() == rows[picked]).all()
    assert list(shards.TokenRows(tmp_path, "validation").bytes(np.array([1, 0]))) == [2**20, 1]


def test_missing_phases_and_short_files_are_named(tmp_path: Path):
    """No index, no such phase, a truncated file, no byte counts: a line that names it."""
    with pytest.raises(K2Error, match=r"index\.json: missing"):
        shards.TokenRows(tmp_path, "pretrain")
    shards.write_rows(tmp_path, "pretrain", np.zeros((7, 9), dtype=np.uint16))
    with pytest.raises(K2Error, match=r"no phase `anneal` \(there are: pretrain\)"):
        shards.TokenRows(tmp_path, "anneal")
    with pytest.raises(K2Error, match="only validation"):
        shards.TokenRows(tmp_path, "pretrain").bytes(np.array([0]))
    (tmp_path / "pretrain.bin").write_bytes(b"\0" * 100)
    with pytest.raises(K2Error, match=r"pretrain\.bin: missing or shorter"):
        shards.TokenRows(tmp_path, "pretrain")
