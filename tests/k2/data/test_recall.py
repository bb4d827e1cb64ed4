import random
import re

import pytest

from k2.data import recall
from k2.tokenizer import ChatTokenizer

STATEMENT = re.compile(r"The secret number of (\w+) is (\d{4})")


@pytest.mark.parametrize("n_tokens", [129, 513, 1025])
@pytest.mark.parametrize("own_filler", [False, True])
def test_every_question_of_a_recall_document_repeats_a_fact(tokenizer: ChatTokenizer, n_tokens: int, own_filler: bool):
    """Exactly n_tokens; each key stands twice, first the fact, then the question, with the same number."""
    filler = tokenizer.encode("Some text of the corpus, as long as it is. ") * 3 if own_filler else None
    counts, rng = set(), random.Random(0)
    for _ in range(20):
        ids = recall.recall_document(rng, tokenizer.encode, n_tokens, filler)
        assert len(ids) == n_tokens
        found = STATEMENT.findall(tokenizer.decode(ids))
        half = len(found) // 2
        assert half and sorted(found[:half]) == sorted(found[half:]) and len({word for word, _ in found}) == half
        counts.add(half)
    assert len(counts) > 2 or n_tokens < 200


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_needle_lies_at_its_depth_and_its_answer_at_the_end(tokenizer: ChatTokenizer, depth: float):
    """The answer's tokens are the last ones, equal the fact's digits, and the fact stands at `depth` of the filler."""
    rng = random.Random(0)
    for n_tokens in (100, 512, 2000):
        ids, start, length = recall.needle_document(rng, tokenizer.encode, n_tokens, depth)
        text = tokenizer.decode(ids)
        (word, number), (asked, answer) = STATEMENT.findall(text)
        assert len(ids) == n_tokens == start + length and (word, number) == (asked, answer)
        assert tokenizer.decode(ids[start:]) == number
        fact = tokenizer.encode(f"\nThe secret number of {word} is ") + tokenizer.encode(number) + tokenizer.encode(".\n")
        place = next(i for i in range(n_tokens) if ids[i : i + len(fact)] == fact)
        filler = n_tokens - 2 * len(fact) + len(tokenizer.encode(".\n"))
        assert place == round(depth * filler)


def test_needles_have_the_form_of_the_training_documents(tokenizer: ChatTokenizer):
    """Trained and tested facts are the same tokens but for word and number: what is learned is what is measured."""
    ids, start, _ = recall.needle_document(random.Random(3), tokenizer.encode, 300, 0.5)
    word, number = STATEMENT.findall(tokenizer.decode(ids))[0]
    fact = tokenizer.encode(f"\nThe secret number of {word} is ") + tokenizer.encode(number) + tokenizer.encode(".\n")
    joined = ",".join(map(str, ids))
    assert ",".join(map(str, fact)) in joined
    rng = random.Random(0)
    for _ in range(300):
        document = recall.recall_document(rng, tokenizer.encode, 300)
        facts = STATEMENT.findall(tokenizer.decode(document))
        if word in dict(facts):
            break
    number = dict(facts)[word]
    fact = tokenizer.encode(f"\nThe secret number of {word} is ") + tokenizer.encode(number) + tokenizer.encode(".\n")
    assert ",".join(map(str, fact)) in ",".join(map(str, document))


def test_documents_follow_the_seed(tokenizer: ChatTokenizer):
    same = [recall.recall_document(random.Random(7), tokenizer.encode, 200) for _ in range(2)]
    assert same[0] == same[1] != recall.recall_document(random.Random(8), tokenizer.encode, 200)


@pytest.mark.parametrize("n_tokens", [5, 20, 40, 60])
def test_short_rows_are_filled_exactly(tokenizer: ChatTokenizer, n_tokens: int):
    assert len(recall.recall_document(random.Random(0), tokenizer.encode, n_tokens)) == n_tokens
