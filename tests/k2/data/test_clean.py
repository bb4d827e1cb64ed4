import random
from collections import Counter
from pathlib import Path

import pytest

from k2.config import CorpusConfig
from k2.data import clean
from k2.data.sources import Document
from k2.errors import K2Error

WORDS = [f"word{i}" for i in range(4000)]


def config(max_bytes: int = 10**9) -> CorpusConfig:
    return CorpusConfig("x", max_bytes, min_characters=20, near_duplicate_threshold=0.8, validation_fraction=0.1, seed=0)


def prose(rng: random.Random, words: int = 200) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + "."


def document(text: str, group: str | None = None) -> Document:
    return Document(text, "text", "unknown", "test", group)


def jaccard(a: str, b: str) -> float:
    """Exact Jaccard similarity of word 5-grams, by its definition."""
    sets = []
    for text in (a, b):
        words = text.strip(".").split()
        sets.append({tuple(words[i : i + 5]) for i in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_are_found_by_their_jaccard_similarity():
    """Texts well above the threshold are found, texts well below are not, against exact similarities."""
    rng = random.Random(0)
    outcomes: dict[bool, Counter] = {True: Counter(), False: Counter()}
    for edits in [1, 2, 30, 60] * 25:
        original = prose(rng, 300)
        words = original.split()
        for place in rng.sample(range(300), edits):
            words[place] = rng.choice(WORDS)
        copy = " ".join(words)
        similarity = jaccard(original, copy)
        near = clean.NearDuplicates(0.8)
        assert not near.seen("a", original)
        found = near.seen("b", copy)
        if similarity > 0.92 or similarity < 0.65:
            outcomes[similarity > 0.92][found] += 1
    assert outcomes[True][False] == 0 and outcomes[True][True] >= 45
    assert outcomes[False][True] == 0 and outcomes[False][False] >= 45


def test_near_duplicates_in_a_script_without_blanks():
    """Chinese text is compared character by character: one changed character in 200 is a near-duplicate, another text is not."""
    rng, near = random.Random(0), clean.NearDuplicates(0.8)
    text = "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(200))
    assert not near.seen("a", text) and near.seen("b", text[:100] + "！" + text[101:])
    assert not near.seen("c", "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(200)))


def test_no_document_stands_in_both_splits_and_none_is_lost():
    """Every document is in one split or counted as dropped; copies and near copies of held-out text are not in training."""
    rng = random.Random(1)
    originals = [prose(rng) for _ in range(200)]
    copies = (
        originals[:50]
        + [text.replace(" ", "  ") + " " for text in originals[50:80]]
        + [text + " end" for text in originals[80:120]]
    )
    corpus = clean.build(map(document, originals + copies + ["too short"]), config())
    train, validation = ({r["id"] for r in part} for part in (corpus.train, corpus.validation))
    assert not train & validation and len(train) + len(validation) == 200
    assert corpus.dropped == {"exact_duplicate": 50, "near_duplicate": 70, "short": 1}
    assert corpus.read == 321 == len(train) + len(validation) + corpus.dropped.total()
    assert all(record["id"] == clean.identity(record["text"]) for record in corpus.train)
    assert 8 <= len(validation) <= 35  # 10 % of 200


def test_groups_are_held_out_together_and_the_split_is_stable():
    """A group is never torn; more documents leave the fate of the old ones alone; another seed draws another split."""
    groups = [f"g{i}" for i in range(300)]
    small, large = clean.hold_out(groups, 0.1, 0), clean.hold_out([*groups, *(f"h{i}" for i in range(300))], 0.1, 0)
    assert small == {g for g in large if g.startswith("g")} and 15 < len(small) < 50
    assert clean.hold_out(groups, 0.1, 1) != small
    assert len(clean.hold_out(["a", "b"], 0.0001, 0)) == 1 == len(clean.hold_out(["a", "b"], 0.9999, 0))
    rng = random.Random(2)
    corpus = clean.build((document(prose(rng), f"g{i % 20}") for i in range(200)), config())
    assert len(corpus.train) % 10 == len(corpus.validation) % 10 == 0 < len(corpus.validation)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("A plain sentence, of some length; nothing is wrong.", None),
        ("def f(x):\n    return {k: v for k, v in x.items() if k != 'a'}\n", None),
        ("中文的文本也可以。这是一个例子，没有问题。", None),
        ("没有空格的长文" * 9 + "".join(chr(0x4E00 + i) for i in range(2000)), None),
        ("", "short"),
        ("tiny", "short"),
        ("=-=-=-=-=-=-=-=-= *** ### |||| title", "symbols"),
        ("Click here for more!\n" * 9 + "Once.", "repeated_lines"),
        ("A blob: " + "QUJD" * 300, "unbroken"),
    ],
)
def test_rules_drop_what_they_say(text: str, reason: str | None):
    assert clean.reject(text, 20) == reason


def test_normalisation_is_idempotent_and_canonical():
    """Composed and decomposed, Unix and DOS texts become one; what UTF-8 cannot hold goes."""
    text = clean.normalise("\r\ne\u0301te\u0301  \r\nzero\0 \ud800x\n\n")
    assert text == "\u00e9t\u00e9\nzero \ufffdx" == clean.normalise(text)


def test_reading_stops_at_max_bytes():
    rng = random.Random(3)
    texts = [prose(rng) for _ in range(100)]
    corpus = clean.build(map(document, texts), config(max_bytes=sum(map(len, texts[:30]))))
    assert corpus.read == 30


@pytest.mark.parametrize("texts", [[], ["short"], ["one document that is long enough"] * 3])
def test_a_corpus_that_cannot_be_split_is_refused(texts: list[str]):
    """Nothing, nothing usable or one document alone is an error that says what happened to the documents."""
    with pytest.raises(K2Error, match=rf"x: \d of {len(texts)} documents are usable \(dropped: .*corpus.min_characters"):
        clean.build(map(document, texts), config())


def test_metrics_count_bytes_by_domain(tmp_path: Path):
    texts = ["é" * 30 + " and more words", "b c d e f " * 5]
    corpus = clean.build([Document(t, d, "", "", None) for t, d in zip(texts, ("docs", "code"))], config())
    metrics = corpus.metrics()
    total = {**metrics["train"], **metrics["validation"]}
    assert total["docs"] == {"documents": 1, "bytes": 60 + 15} and total["code"] == {"documents": 1, "bytes": 49}
