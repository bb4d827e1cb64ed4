from collections import Counter

import numpy as np
import pytest
import torch

from k2.data.shards import TokenRows, write_rows
from k2.errors import K2Error
from k2.tokenizer import ChatTokenizer, bpe
from k2.train.batches import DialogueBatches, RowBatches, pack

T, ROWS = 8, 12


@pytest.fixture
def rows(tmp_path):
    """Row i holds the tokens 100 i, 100 i + 1, ..."""
    write_rows(tmp_path, "pretrain", (100 * np.arange(ROWS)[:, None] + np.arange(T + 1)).astype("<u2"))
    return TokenRows(tmp_path, "pretrain")


def seen(batches, step):
    return [int(row[0]) // 100 for batch in batches.step(step) for row in batch.inputs]


def test_rows_are_a_function_of_the_step(rows):
    """A step asked for out of order, or by another object of the same seed, is the same; another seed gives another order."""
    forth = RowBatches(rows, T, 4 * T, 2 * T, seed=3)
    steps = [seen(forth, i) for i in range(7)]
    assert [seen(forth, i) for i in reversed(range(7))] == steps[::-1]
    assert [seen(RowBatches(rows, T, 4 * T, 2 * T, seed=3), i) for i in range(7)] == steps
    assert [seen(RowBatches(rows, T, 4 * T, 2 * T, seed=4), i) for i in range(7)] != steps


@pytest.mark.parametrize("batch", [4, 5])
def test_an_epoch_sees_every_row_once(rows, batch):
    """Also where an epoch ends within a step; the next epoch has another order."""
    batches = RowBatches(rows, T, batch * T, T, seed=0)
    flat = [i for step in range(5 * ROWS // batch) for i in seen(batches, step)]
    epochs = [flat[k : k + ROWS] for k in range(0, 4 * ROWS, ROWS)]
    assert all(sorted(epoch) == list(range(ROWS)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)


def test_targets_are_the_next_tokens(rows):
    """A step is cut into micro-batches of micro_batch_tokens; each target is its input's successor and counts."""
    parts = RowBatches(rows, T, 6 * T, 2 * T, seed=0).step(0)
    assert [tuple(part.inputs.shape) for part in parts] == [(2, T)] * 3
    for part in parts:
        assert torch.equal(part.targets, part.inputs + 1) and torch.equal(part.weights, torch.ones(2, T))


def test_rows_that_do_not_fit_are_refused(rows):
    """Another length than the stage's, or too few for one batch: the message says what to do."""
    with pytest.raises(K2Error, match="run the tokenize stage again"):
        RowBatches(rows, T + 1, 4 * T, T, seed=0)
    with pytest.raises(K2Error, match="smaller batch_tokens"):
        RowBatches(rows, T, (ROWS + 1) * T, T, seed=0)


def dialogues(count, seed=0):
    """(tokens, mask) of 5 to 24 tokens: a prompt, then trained tokens. Each token says its dialogue and its place."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 25, count)
    return [([1000 * i + k for k in range(n)], [k >= n // 2 for k in range(n)]) for i, n in enumerate(lengths)]


def test_loss_falls_on_the_masked_tokens_and_no_others():
    """Trap 11: over an epoch, the targets with weight 1 are exactly the tokens that the mask marks, each once."""
    given = dialogues(40)
    batches = DialogueBatches(given, 32, 200, 64, seed=0)
    steps = -(-len(given) // batches.batch)
    trained = Counter()
    for step in range(steps):
        for batch in batches.step(step):
            assert set(batch.weights.unique().tolist()) <= {0.0, 1.0}
            trained.update(batch.targets[batch.weights > 0].tolist())
    expected = {token for ids, mask in given for token, marked in zip(ids, mask) if marked}
    assert set(trained) == expected
    extra = steps * batches.batch - len(given)  # the last step reaches into the next epoch
    assert sum(trained.values()) <= len(expected) + extra * 24 and min(trained.values()) == 1


def test_assistant_words_and_their_end_are_what_is_trained():
    """With the real chat template: what carries loss reads as the assistant's words, each turn closed by <|im_end|>."""
    tokenizer = bpe.train(["hello there, how are you? fine and you"] * 3, 400)
    chat = ChatTokenizer(tokenizer)
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "how are you"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "and there"},
        {"role": "assistant", "content": "hello there"},
    ]
    (batch,) = DialogueBatches([chat.encode_chat(messages)], 256, 1, 256, seed=0).step(0)
    trained = tokenizer.decode(batch.targets[batch.weights > 0].tolist(), skip_special_tokens=False)
    assert trained == "fine<|im_end|>hello there<|im_end|>"


def test_dialogues_too_long_are_cut_and_those_without_words_left_out():
    """A dialogue is cut behind seq_len targets; one whose trained words all lie behind that is not seen; none left is an error."""
    short, late = ([1, 2, 3, 4], [False, False, True, True]), (list(range(50)), [False] * 40 + [True] * 10)
    long = (list(range(100, 150)), [False] * 5 + [True] * 45)
    batches = DialogueBatches([short, late, long], 16, 64, 64, seed=0)
    inputs = torch.cat([b.inputs[0] for step in range(2) for b in batches.step(step)])
    assert not set(inputs.tolist()) & set(range(5, 50)) and inputs.max() == 115
    with pytest.raises(K2Error, match="raise seq_len"):
        DialogueBatches([late], 16, 64, 64, seed=0)


def test_micro_batches_keep_their_bound_and_split_no_dialogue():
    """At most micro_batch_tokens each, as few as this order allows, every dialogue whole in one of them."""
    given = dialogues(60)
    packed = pack(given, 64)
    assert all(batch.inputs.numel() <= 64 for batch in packed)
    lengths = [batch.inputs.numel() for batch in packed]
    starts = [len(given[int(batch.inputs[0, 0]) // 1000][0]) - 1 for batch in packed]
    assert all(before + start > 64 for before, start in zip(lengths, starts[1:]))  # the next one would not have fitted
    assert torch.equal(torch.cat([b.inputs[0] for b in packed]), torch.tensor([t for ids, _ in given for t in ids[:-1]]))
    for batch in packed:
        assert batch.packing is not None
        assert torch.equal(batch.packing.positions, batch.inputs[0] % 1000)


def test_packed_dialogues_do_not_see_each_other(make_model):
    """Each dialogue's states are those of the dialogue alone."""
    model = make_model()
    rng = np.random.default_rng(0)
    given = [(rng.integers(0, 128, n).tolist(), [True] * n) for n in (7, 30, 2, 18)]
    (batch,) = pack(given, 64)
    with torch.no_grad():
        packed = model.hidden(batch.inputs, batch.packing)[0].split([len(ids) - 1 for ids, _ in given])
        for (ids, _), found in zip(given, packed):
            torch.testing.assert_close(found, model.hidden(torch.tensor([ids[:-1]]))[0], rtol=1e-4, atol=1e-5)


def test_dialogues_are_a_function_of_the_step():
    """As with rows; and a step has about batch_tokens."""
    given = dialogues(50)

    def steps(order, seed):
        batches = DialogueBatches(given, 32, 200, 64, seed)
        found = {i: torch.cat([b.inputs[0] for b in batches.step(i)]).tolist() for i in order}
        return [found[i] for i in sorted(order)]

    forth = steps(range(8), 0)
    assert steps(range(7, -1, -1), 0) == forth and steps(range(8), 1) != forth
    assert abs(np.mean([len(step) for step in forth]) - 200) < 40
