import random
import re

import pytest

from k2.data import recall
from k2.tokenizer import ChatTokenizer

STATEMENT = re.compile(r"The secret word is (\w+)")


def fact(tokenizer: ChatTokenizer, word: str) -> list[int]:
    return tokenizer.encode("\nThe secret word is") + tokenizer.encode(f" {word}") + tokenizer.encode(".\n")


def places(ids: list[int], piece: list[int]) -> list[int]:
    return [i for i in range(len(ids)) if ids[i : i + len(piece)] == piece]


@pytest.mark.parametrize("n_tokens", [129, 513, 1025])
@pytest.mark.parametrize("own_filler", [False, True])
def test_every_question_of_a_recall_document_repeats_its_fact(tokenizer: ChatTokenizer, n_tokens: int, own_filler: bool):
    """Exactly n_tokens; one word a document, told once and asked for at least once; the words differ between documents."""
    filler = tokenizer.encode("Some text of the corpus, as long as it is. ") * 3 if own_filler else None
    words, counts, rng = set(), set(), random.Random(0)
    for _ in range(20):
        ids = recall.recall_document(rng, tokenizer.encode, n_tokens, filler)
        assert len(ids) == n_tokens
        found = STATEMENT.findall(tokenizer.decode(ids))
        assert 2 <= len(found) <= n_tokens / 16 and len(set(found)) == 1
        words.add(found[0])
        counts.add(len(found))
    assert len(words) > 5 and len(counts) > 3


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_needle_lies_at_its_depth_and_its_answer_at_the_end(tokenizer: ChatTokenizer, depth: float):
    """The answer's tokens are the last ones, spell the fact's word, and the fact stands at `depth` of the filler."""
    rng = random.Random(0)
    for n_tokens in (100, 512, 2000):
        ids, start, length = recall.needle_document(rng, tokenizer.encode, n_tokens, depth)
        told, asked = STATEMENT.findall(tokenizer.decode(ids))
        assert len(ids) == n_tokens == start + length and told == asked
        assert tokenizer.decode(ids[start:]) == f" {told}"
        filler = n_tokens - 2 * len(fact(tokenizer, told)) + len(tokenizer.encode(".\n"))
        assert places(ids, fact(tokenizer, told)) == [round(depth * filler)]


def test_needles_have_the_form_of_the_training_documents(tokenizer: ChatTokenizer):
    """Trained and tested facts are the same tokens: what is learned is what is measured."""
    ids, _, _ = recall.needle_document(random.Random(3), tokenizer.encode, 300, 0.5)
    word = STATEMENT.findall(tokenizer.decode(ids))[0]
    assert len(places(ids, fact(tokenizer, word))) == 1
    document = next(
        d
        for d in (recall.recall_document(random.Random(i), tokenizer.encode, 300) for i in range(300))
        if f" {word}" in tokenizer.decode(d)
    )
    assert len(places(document, fact(tokenizer, word))) >= 2


def test_documents_follow_the_seed(tokenizer: ChatTokenizer):
    same = [recall.recall_document(random.Random(7), tokenizer.encode, 200) for _ in range(2)]
    assert same[0] == same[1] != recall.recall_document(random.Random(8), tokenizer.encode, 200)


@pytest.mark.parametrize("n_tokens", [5, 20, 40, 60])
def test_short_rows_are_filled_exactly(tokenizer: ChatTokenizer, n_tokens: int):
    assert len(recall.recall_document(random.Random(0), tokenizer.encode, n_tokens)) == n_tokens
