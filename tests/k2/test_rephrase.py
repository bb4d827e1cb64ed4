"""Cutting, prompting and verification. The language model here is a scripted rewriter; the real one is tested in tests/k2/llm."""

import re
from typing import Any

import pytest

from k2 import rephrase
from k2.config import RephraseConfig
from k2.errors import ConfigError
from k2.llm.embedding import SentenceEmbedder

LISTS = (
    "A list is a mutable sequence that can hold items of any kind, and the number of its items may grow and shrink.\n\n"
    "Items are added to the end of a list with the append method. The pop method removes the last item and returns it.\n\n"
    "The sort method puts the items of a list in order, from the smallest to the largest, and returns nothing."
)
REWRITES = {
    "A list is a mutable": "Lists are sequences which may change: any number of items, of whatever type you like.",
    "Items are added": "To put an item at the end of a list call append; call pop to take the last item away and get it back.",
    "The sort method": "Call sort if you want a list to have its items in ascending order; the call gives back nothing.",
}
UNRELATED = "The museum opens at nine in the morning and visitors may walk through its gardens until sunset."


def config(**changes: Any) -> RephraseConfig:
    values = {"documents": 5, "rewrites_per_document": 2, "styles": ["encyclopedia", "concise", "tutorial"], "excerpt_tokens": 100}
    return RephraseConfig(**{**values, "chunk_tokens": 40, "min_similarity": 0.75, "seed": 0, **changes})


def document(name: str, text: str, domain: str = "docs") -> dict[str, str]:
    return {"id": name, "text": text, "domain": domain, "license": "PSF-2.0", "source": f"test/{name}"}


class Rewriter:
    """Answers by script, and remembers what it was asked: one list of chats a call."""

    def __init__(self, answer) -> None:
        self.answer, self.calls, self.tokens = answer, [], 0

    def generate(self, chats, max_new_tokens, temperature, top_p, seed, progress=lambda n: None) -> list[str]:
        self.calls.append(chats)
        progress(len(chats))
        return [self.answer(chat) for chat in chats]


def scripted(chat: list[dict[str, str]]) -> str:
    return next(rewrite for start, rewrite in REWRITES.items() if chat[-1]["content"].startswith(start))


@pytest.fixture(scope="module")
def similarity():
    return SentenceEmbedder().similarity


def test_each_chunk_is_written_in_sight_of_the_rewrites_before_it(similarity) -> None:
    """Chunk k's prompt ends with chunk k and has rewrites 0 to k - 1 as the model's own turns; all drafts go together."""
    model = Rewriter(scripted)
    kept, rejected = rephrase.rephrase([document("a", LISTS), document("b", LISTS)], config(), model, similarity, 0.5, 0.9)
    chunks = rephrase.split(rephrase.prose(LISTS), 40)
    assert len(chunks) == 3 and len(model.calls) == 3
    assert [len(call) for call in model.calls] == [4, 4, 4]  # 2 documents in 2 styles
    rewrites = list(REWRITES.values())
    for k, call in enumerate(model.calls):
        for chat in call:
            assert chat[-1] == {"role": "user", "content": chunks[k]}
            assert [m["content"] for m in chat if m["role"] == "assistant"] == rewrites[:k]
    assert kept[0]["text"] == "\n\n".join(rewrites) and rejected  # the same text again is a duplicate


def test_the_faithful_are_kept_and_the_unrelated_rejected_with_their_scores(similarity) -> None:
    def answer(chat: list[dict[str, str]]) -> str:
        return UNRELATED if "formal" in chat[0]["content"] else scripted(chat)

    kept, rejected = rephrase.rephrase([document("a", LISTS)], config(), Rewriter(answer), similarity, 0.5, 0.9)
    assert [(r["style"], r["rewrite_of"], r["domain"]) for r in kept] == [("concise", "a", "rewrites")]
    assert [(r["style"], r["reason"]) for r in rejected] == [("encyclopedia", "unfaithful")]
    assert kept[0]["similarity"] > 0.75 > 0.3 > rejected[0]["similarity"]
    assert kept[0]["license"] == "PSF-2.0" and re.fullmatch(r"[0-9a-f]{16}", kept[0]["id"])
    figures = rephrase.summary(kept, rejected)
    assert (figures["kept"], figures["rejected"]) == (1, 1) and figures["mean_similarity"] == kept[0]["similarity"]
    assert figures["mean_similarity_all"] == pytest.approx((kept[0]["similarity"] + rejected[0]["similarity"]) / 2, abs=1e-4)


def test_what_is_no_rewrite_is_rejected_however_similar() -> None:
    source = " ".join(f"word{i}" for i in range(60))
    other = " ".join(f"term{i}" for i in range(60))
    assert rephrase.fault(source, other, 0.9, 0.75) == ""
    assert rephrase.fault(source, source, 1.0, 0.75) == "copy"
    assert rephrase.fault(source, "Here is the rewritten text: " + other, 0.9, 0.75) == "talks about the task"
    assert rephrase.fault(source, " ".join(["so it goes on and on again here"] * 9), 0.9, 0.75) == "repeats itself"
    assert rephrase.fault(source, other, float("nan"), 0.75) == "unfaithful"


def test_chunks_hold_the_whole_text_and_end_at_sentences() -> None:
    """Nothing lost or repeated, none above the limit, every cut of ordinary prose at a sentence's end."""
    text = " ".join(f"Sentence number {i} says something about item {i}." for i in range(60))
    chunks = rephrase.split(text, 50)
    assert " ".join(chunks) == text
    assert all(len(chunk) <= 50 * 4 and chunk.endswith(".") for chunk in chunks) and len(chunks) > 10
    endless = "a" * 1000 + " " + "b " * 300  # no sentence ends here
    assert "".join(rephrase.split(endless, 50)).replace(" ", "") == endless.replace(" ", "")
    assert all(len(chunk) <= 50 * 4 for chunk in rephrase.split(endless, 50))
    part = rephrase.excerpt(text, 100)
    assert text.startswith(part) and part.endswith(".") and 300 < len(part) <= 400


def test_only_prose_is_rewritten_and_the_best_come_first() -> None:
    """Headings, grammar, tables and code are left out; code documents are not taken; at most `documents`, ties by id."""
    mixed = "Heading\n*******\n\n" + LISTS + "\n\n   x = [1, 2]\n   print(x[0], end='')  # a comment\n\nlist ::= '[' expression ']'"
    assert rephrase.prose(mixed) == LISTS and "print" not in rephrase.excerpt(mixed, 400)
    table = "\n".join(f"x_{i} = f({i}) | {i} | 0x{i:04x} and so on with {i}" for i in range(50))
    documents = [document("t", table), document("c", LISTS, "code"), document("z", LISTS), document("a", LISTS)]
    assert [d["id"] for d in rephrase.best(documents, 5, 100)] == ["a", "z"]
    assert [d["id"] for d in rephrase.best(documents, 1, 100)] == ["a"]


def test_styles_are_cycled_and_wrong_ones_named() -> None:
    drafts = rephrase.plan([document("a", LISTS), document("b", LISTS)], config())
    assert [draft.style for draft in drafts] == ["encyclopedia", "concise", "tutorial", "encyclopedia"]
    with pytest.raises(ConfigError, match="rephrase.styles: no style `poem`"):
        rephrase.plan([], config(styles=["poem", "concise"]))
    with pytest.raises(ConfigError, match="rephrase.rewrites_per_document"):
        rephrase.plan([], config(rewrites_per_document=4))
