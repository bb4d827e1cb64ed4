"""Documents that can only be continued by recalling a word that stood far back: they teach and test long context.

    ...filler... The secret word is amber. ...filler... The secret word is amber. ...filler... The secret word is amber.

A document keeps one word; its first sentence is the fact, every later one a question with its answer. The needle test of the
evaluation has the same form: the fact at a chosen depth, asked for in the last line. Everything is built of separately encoded
pieces, so that fact and question have the same tokens, whatever the tokenizer. (Not in the report, whose long-context data are not
public; the form follows the needle-in-a-haystack test and RULER, arXiv 2404.06654.)
"""

import random
from collections.abc import Callable, Sequence

Encode = Callable[[str], list[int]]

QUESTION = "\nThe secret word is"
DENSEST = 16  # tokens a question: dense documents are what recall is learnt from, sparse ones what stretches it
WORDS = (
    "amber basalt cedar dahlia ember falcon garnet hazel indigo jasper kestrel lotus maple nectar opal pepper quartz raven saffron "
    "topaz umber velvet walnut xenon yarrow zinnia"
).split()
NOISE = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    " The rain falls on the hill and the wind moves the leaves.",
    " A long road leads from the town to the sea, and few walk it.",
    " In the evening the shops close and the streets grow quiet.",
)


def recall_document(rng: random.Random, encode: Encode, n_tokens: int, filler: Sequence[int] | None = None) -> list[int]:
    """A training document of exactly n_tokens: the same fact at random places, first told, then asked for, once or very often.

    `filler` is a stretch of corpus tokens to hide it in, as long as it likes; None takes sentences of NOISE.
    """
    fact = _fact(encode, rng.choice(WORDS))
    count = round(2 * max(1, n_tokens / DENSEST / 2) ** rng.random())  # log-uniform from 2
    while count > 1 and count * len(fact) > n_tokens:  # a very short row or a very coarse tokenizer
        count -= 1
    room = n_tokens - count * len(fact)
    if room < 0:
        return fact[:n_tokens]
    body = _filler(rng, encode, room, filler)
    cuts = [0, *sorted(rng.randint(0, room) for _ in range(count)), room]
    ids: list[int] = []
    for start, stop in zip(cuts[:-2], cuts[1:-1], strict=True):
        ids += body[start:stop] + fact
    return ids + body[cuts[-2] :]


def needle_document(
    rng: random.Random, encode: Encode, n_tokens: int, depth: float, filler: Sequence[int] | None = None
) -> tuple[list[int], int, int]:
    """A test document of exactly n_tokens with the fact at `depth` (0 the beginning, 1 the end), asked for at its end.

    Returns the tokens and where the answer begins and how long it is: ids[start : start + length] are the word, the last tokens.
    """
    word = rng.choice(WORDS)
    fact, ask, answer = _fact(encode, word), encode(QUESTION), encode(f" {word}")
    room = n_tokens - len(fact) - len(ask) - len(answer)
    if room < 0:
        raise ValueError(f"n_tokens {n_tokens} is too short for a needle; it takes {n_tokens - room}")
    body = _filler(rng, encode, room, filler)
    place = round(depth * room)
    return body[:place] + fact + body[place:] + ask + answer, n_tokens - len(answer), len(answer)


def _fact(encode: Encode, word: str) -> list[int]:
    return encode(QUESTION) + encode(f" {word}") + encode(".\n")


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
