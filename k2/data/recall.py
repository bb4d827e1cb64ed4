"""Documents that can only be continued by recalling what stood far back: they teach and test long context.

    ...filler... The secret number of amber is 4821. ...filler... The secret number of river is 77. ...filler...
    The secret number of river is 77. The secret number of amber is 4821.

The needle test of the evaluation has the same form: one fact at a chosen depth, asked for in the last line. Everything is built of
separately encoded pieces, so that the fact and the question have the same tokens, whatever the tokenizer. (Not in the report, whose
long-context data are not public; the form follows the needle-in-a-haystack test and RULER, arXiv 2404.06654.)
"""

import random
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]

DIGITS = 4
WORDS = (
    "amber anchor apple arrow autumn basket bell birch bridge bronze butter candle canyon castle cedar chalk cherry circle cloud "
    "clover coffee copper coral cotton crystal desert diamond dragon eagle ember engine falcon feather field flute forest fountain "
    "garden ginger glacier granite hammer harbor hazel honey island ivory jacket jasmine jungle kettle ladder lantern lemon lily "
    "marble meadow mirror mountain nectar needle ocean olive orange orchid owl palace paper pearl pepper pine planet pocket quartz "
    "rabbit raven ribbon river rocket saddle salmon silver spider spring stone summer temple thunder tiger tower tulip tunnel "
    "valley velvet violet walnut whale willow window winter wolf zebra"
).split()
NOISE = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    " The rain falls on the hill and the wind moves the leaves.",
    " A long road leads from the town to the sea, and few walk it.",
    " In the evening the shops close and the streets grow quiet.",
)


def recall_document(rng: random.Random, encode: Encode, n_tokens: int, filler: Sequence[int] | None = None) -> list[int]:
    """A training document of exactly n_tokens: facts at random places, then a question with its answer for each, in random order.

    `filler` is a stretch of corpus tokens to hide the facts in, as long as it likes; None takes sentences of NOISE.
    """
    most = max(1, min(len(WORDS), n_tokens // 40))
    facts = _facts(rng, encode, rng.randint(1, most))
    questions = rng.sample(facts, len(facts))
    while sum(map(len, facts)) + sum(map(len, questions)) > n_tokens:  # a very short row or a very coarse tokenizer
        questions.pop()
        if not questions:
            return (facts[0] * (n_tokens // len(facts[0]) + 1))[:n_tokens]
        facts = [fact for fact in facts if fact in questions]
    room = n_tokens - sum(map(len, facts)) - sum(map(len, questions))
    body = _filler(rng, encode, room, filler)
    cuts = [0, *sorted(rng.randint(0, room) for _ in facts), room]
    ids: list[int] = []
    for i, fact in enumerate(facts):
        ids += body[cuts[i] : cuts[i + 1]] + fact
    ids += body[cuts[-2] :]
    for question in questions:
        ids += question
    return ids


def needle_document(
    rng: random.Random, encode: Encode, n_tokens: int, depth: float, filler: Sequence[int] | None = None
) -> tuple[list[int], int, int]:
    """A test document of exactly n_tokens with one fact at `depth` (0 the beginning, 1 the end), asked for at its end.

    Returns the tokens and where the answer begins and how long it is: ids[start : start + length] are the digits, the last tokens.
    """
    word, number = rng.choice(WORDS), _number(rng)
    ask, answer = _ask(encode, word), encode(number)
    fact = ask + answer + encode(".\n")
    room = n_tokens - len(fact) - len(ask) - len(answer)
    if room < 0:
        raise ValueError(f"n_tokens {n_tokens} is too short for a needle; it takes {n_tokens - room}")
    body = _filler(rng, encode, room, filler)
    place = round(depth * room)
    return body[:place] + fact + body[place:] + ask + answer, n_tokens - len(answer), len(answer)


def _facts(rng: random.Random, encode: Encode, count: int) -> list[list[int]]:
    return [_ask(encode, word) + encode(_number(rng)) + encode(".\n") for word in rng.sample(WORDS, count)]


def _ask(encode: Encode, word: str) -> list[int]:
    return encode(f"\nThe secret number of {word} is ")


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))


def _filler(rng: random.Random, encode: Encode, count: int, filler: Sequence[int] | None) -> list[int]:
    """`count` tokens of the corpus stretch, repeated if it is too short, or of noise sentences."""
    ids = list(filler[: count + 1]) if filler is not None and len(filler) else []
    if not ids:
        sentences = [encode(sentence) for sentence in NOISE]
        while len(ids) < count:
            ids += rng.choice(sentences)
    while len(ids) < count:
        ids += ids
    return ids[:count]
