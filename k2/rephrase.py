"""Rephrasing of knowledge text, so that it can be seen more than once without being repeated (report section 2.2, figure 4).

Style- and perspective-diverse prompts; chunk-wise autoregressive rewriting (an excerpt is cut at paragraph and sentence borders,
each chunk is rewritten in sight of the rewrites before it, the rewrites are joined); fidelity verification by the cosine of
sentence embeddings. Only running text is rewritten: headings, tables, grammar and code stay out of the excerpt. Rewrites that
fail are kept apart with their score and the reason.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from k2.config import RephraseConfig
from k2.errors import ConfigError
from k2.llm import ChatModel, Message
from k2.progress import bar

Document = dict[str, Any]

# The wording of SmolLM2's own rewriting data: a model so small follows no other.
RULES = "You're an AI assistant for text re-writing. Rewrite the input text {}. Write only the rewritten text."
STYLES = {
    "encyclopedia": "to make it more professional and formal, like an encyclopedia article, while retaining its essential content",
    "concise": "to make it more concise while preserving its core meaning",
    "tutorial": "to make it more friendly and approachable, like a tutorial for beginners, while maintaining its main points",
    "question_and_answer": "as a question and its answer, while maintaining its main points",
    "learning_notes": "as a student's learning notes in short plain sentences, while maintaining its main points",
    "dialogue": "as a dialogue between a teacher and a student, while maintaining its main points",
}

CHARACTERS_PER_TOKEN = 4  # English prose; an endpoint's tokenizer is not ours to ask
MIN_PARAGRAPH, MIN_PROSE = 60, 0.6  # characters, and prose_share, of what counts as running text
CONTEXT_CHUNKS = 4  # earlier rewrites that a chunk is written in sight of
COPY_WORDS, COPY_SHARE = 8, 0.7  # a rewrite is a copy when this share of its runs of 8 words stand in the source
META = re.compile(r"\b(rewrit|rewrote|original text|original sentence|rephras|as an ai)", re.IGNORECASE)


@dataclass
class Draft:
    """One rewrite in the making: a document, a style, and its chunks rewritten so far."""

    document: Document
    style: str
    chunks: list[str]
    rewrites: list[str] = field(default_factory=list)

    def chat(self) -> list[Message]:
        """The prompt of the next chunk. Earlier chunks stand in it as turns that the model has already answered."""
        messages: list[Message] = [{"role": "system", "content": RULES.format(STYLES[self.style])}]
        at = len(self.rewrites)
        for i in range(max(0, at - CONTEXT_CHUNKS), at + 1):
            messages.append({"role": "user", "content": self.chunks[i]})
            if i < at:
                messages.append({"role": "assistant", "content": self.rewrites[i]})
        return messages


def rephrase(
    documents: Iterable[Document],
    config: RephraseConfig,
    model: ChatModel,
    similarity: Callable[[list[str], list[str]], list[float]],
    temperature: float,
    top_p: float,
) -> tuple[list[Document], list[Document]]:
    """Rewrites kept and rejected: documents with `rewrite_of`, `style`, `similarity`, the rejected with `reason`.

    `similarity` scores pairs of texts in [-1, 1]. Chunk k of all documents and styles is generated together, then chunk k + 1.
    """
    drafts = plan(documents, config)
    longest = max((len(draft.chunks) for draft in drafts), default=0)
    with bar("rephrase", sum(len(draft.chunks) for draft in drafts), "chunk") as progress:
        for step in range(longest):
            open_ = [draft for draft in drafts if step < len(draft.chunks)]
            chats, budget = [draft.chat() for draft in open_], round(config.chunk_tokens * 1.25)
            answers = model.generate(chats, budget, temperature, top_p, config.seed + 1000 * step, progress.update)
            for draft, answer in zip(open_, answers):
                draft.rewrites.append(whole_sentences(answer))
    return verify(drafts, config.min_similarity, similarity)


def plan(documents: Iterable[Document], config: RephraseConfig) -> list[Draft]:
    """The drafts to write: the best documents, each in `rewrites_per_document` different styles, cycled."""
    for style in config.styles:
        if style not in STYLES:
            raise ConfigError(f"params.yaml: rephrase.styles: no style `{style}`; known: {', '.join(STYLES)}")
    if config.rewrites_per_document > len(config.styles):
        raise ConfigError("params.yaml: rephrase.rewrites_per_document: more than there are styles; add styles or take fewer")
    drafts = []
    for i, document in enumerate(best(documents, config.documents, config.excerpt_tokens)):
        chunks = split(excerpt(document["text"], config.excerpt_tokens), config.chunk_tokens)
        for j in range(config.rewrites_per_document):
            drafts.append(Draft(document, config.styles[(i * config.rewrites_per_document + j) % len(config.styles)], chunks))
    return drafts


def best(documents: Iterable[Document], count: int, excerpt_tokens: int) -> list[Document]:
    """The `count` documents, code apart, whose excerpt has the largest share of prose; ties by id."""
    scored = []
    for document in documents:
        if document["domain"] != "code":
            part = excerpt(document["text"], excerpt_tokens)
            if not part:
                continue
            fill = min(1.0, len(part) / (excerpt_tokens * CHARACTERS_PER_TOKEN * 0.5))  # a short document gives little
            scored.append((-prose_share(part) * fill, document["id"], document))
    scored.sort(key=lambda entry: entry[:2])
    return [document for *_, document in scored[:count]]


def prose_share(text: str) -> float:
    """Share of the words that are plain lower-case letters (with a first capital and punctuation at the end): high in prose."""
    words = text.split()
    plain = sum(bool(re.fullmatch(r"[A-Za-z]?[a-z]+[.,;:!?]?", word)) for word in words)
    return plain / max(1, len(words))


# -- cutting ----------------------------------------------------------------------------------------------------------------------
def excerpt(text: str, tokens: int) -> str:
    """The beginning of a text's prose, cut at a sentence's end, of at most `tokens` tokens."""
    taken, room = [], tokens * CHARACTERS_PER_TOKEN
    for piece in sentences(prose(text), tokens):
        room -= len(piece)
        if room < 0:
            break
        taken.append(piece)
    return "".join(taken).strip()


def prose(text: str) -> str:
    """The paragraphs of running text, each on one line, with a blank line between two."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n\n".join(p for p in paragraphs if len(p) >= MIN_PARAGRAPH and prose_share(p) >= MIN_PROSE and "::=" not in p)


def split(text: str, chunk_tokens: int) -> list[str]:
    """Cut at paragraph and sentence borders into chunks of at most `chunk_tokens` tokens that hold all of the text."""
    chunks, current = [], ""
    for piece in sentences(text, chunk_tokens):
        if current.strip() and len(current) + len(piece.rstrip()) > chunk_tokens * CHARACTERS_PER_TOKEN:
            chunks.append(current.strip())
            current = ""
        current += piece
    if current.strip():
        chunks.append(current.strip())
    return chunks


def sentences(text: str, tokens: int) -> list[str]:
    """Pieces whose concatenation is the text, each a sentence or paragraph end; what is longer than `tokens` is cut at blanks."""
    room = tokens * CHARACTERS_PER_TOKEN
    pieces = []
    for piece in re.split(r"(?<=\n\n)(?=\S)|(?<=[.!?] )(?=\S)|(?<=[.!?]\n)(?=\S)", text):
        while len(piece) > room:
            at = max(piece.rfind(" ", 0, room), piece.rfind("\n", 0, room)) + 1 or room
            pieces.append(piece[:at])
            piece = piece[at:]
        pieces.append(piece)
    return [piece for piece in pieces if piece]


def whole_sentences(text: str) -> str:
    """Drop the last sentence if generation was cut in it (unless it is the only one)."""
    end = max(text.rfind(mark) for mark in ".!?")
    return text if end < 0 or text.endswith((".", "!", "?", '"', "`", ")", ":")) else text[: end + 1]


# -- verification -----------------------------------------------------------------------------------------------------------------
def verify(
    drafts: list[Draft], min_similarity: float, similarity: Callable[[list[str], list[str]], list[float]]
) -> tuple[list[Document], list[Document]]:
    """Score every draft against its source and part the faithful from the rest."""
    sources = [" ".join(draft.chunks) for draft in drafts]
    texts = ["\n\n".join(draft.rewrites) for draft in drafts]
    kept, rejected, seen = [], [], set()
    for draft, source, text, score in zip(drafts, sources, texts, similarity(sources, texts)):
        document = draft.document
        record = {
            "id": hashlib.sha256(text.encode()).hexdigest()[:16],
            "text": text,
            "domain": "rewrites",
            "license": document["license"],
            "source": document["source"],
            "rewrite_of": document["id"],
            "style": draft.style,
            "similarity": round(score, 4),
        }
        reason = fault(source, text, score, min_similarity) or ("duplicate" if text in seen else "")
        seen.add(text)
        if reason:
            rejected.append({**record, "reason": reason})
        else:
            kept.append(record)
    return kept, rejected


def fault(source: str, text: str, score: float, min_similarity: float) -> str:
    """Why a rewrite is rejected, "" if it is not."""
    if not score >= min_similarity:  # NaN is no similarity
        return "unfaithful"
    if len(META.findall(text)) > len(META.findall(source)):
        return "talks about the task"
    runs = word_runs(text)
    if len(runs) < 0.5 * max(1, len(text.split()) - COPY_WORDS + 1):
        return "repeats itself"
    if len(runs & word_runs(source)) > COPY_SHARE * max(1, len(runs)):
        return "copy"
    return ""


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + COPY_WORDS]) for i in range(len(words) - COPY_WORDS + 1)}


def summary(kept: list[Document], rejected: list[Document]) -> dict[str, Any]:
    """The stage's figures: counts, by style and by reason, and the mean similarity (cosine) of kept and of all."""
    scores = [record["similarity"] for record in kept]
    every = scores + [record["similarity"] for record in rejected]
    return {
        "kept": len(kept),
        "rejected": len(rejected),
        "mean_similarity": round(sum(scores) / max(1, len(scores)), 4),
        "mean_similarity_all": round(sum(every) / max(1, len(every)), 4),
        "kept_by_style": dict(sorted(Counter(record["style"] for record in kept).items())),
        "rejected_by_reason": dict(sorted(Counter(record["reason"] for record in rejected).items())),
    }
