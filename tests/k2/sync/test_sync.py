import copy
import threading

import pytest
import torch

from k2.errors import K2Error
from k2.serve.engine import Engine
from k2.sync.buckets import ALIGNMENT
from k2.sync.checkpoint_engine import CheckpointEngine
from k2.sync.receiver import Receiver
from k2.sync.transport import LocalTransport

PROMPTS = [[5, 9, 3], [7], [100, 20, 30, 40]]
BUCKET = 48 << 10  # an expert's gate_up_proj is 64 KiB in float32: a stack of experts fills several


def answers(engine):
    return engine.generate(PROMPTS, 12, temperature=0.0, seed=0)


@pytest.fixture
def sides(make_model):
    """A trained model, an engine with other weights, and the way between them."""
    model, engine = make_model(), Engine(make_model(seed=1), [999], version=0)
    return model, engine, CheckpointEngine(BUCKET), LocalTransport(Receiver(engine))


def test_syncing_twice_gives_the_same_answers(sides):
    """The engine answers as the model does, to the bit, after the first sync and after a second one of the same weights."""
    model, engine, sender, transport = sides
    expected = answers(Engine(copy.deepcopy(model), [999]))
    assert answers(engine) != expected
    for version in (1, 2):
        sender.push(model.state_dict().items(), [transport], version)
        assert engine.version == version
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), engine.model.state_dict().values()))
        assert answers(engine) == expected


def test_buckets_hold_whole_tensors(sides):
    """Every tensor is in exactly one bucket, whole and aligned, with its dtype and shape; experts are spread over several."""
    model, _, sender, _ = sides
    sender.register("a", model.cast(torch.bfloat16).state_dict().items())
    buckets = sender.gather("a")
    metas = [meta for bucket in buckets for meta in bucket.tensors]
    state = model.state_dict()
    assert [m.name for m in metas] == list(state)
    assert all((m.dtype, m.shape, m.size) == (t.dtype, tuple(t.shape), t.nbytes) for m, t in zip(metas, state.values()))
    assert {m.dtype for m in metas} == {torch.bfloat16, torch.float32}  # routers stay float32
    for bucket in buckets:
        ends = [0, *(m.offset + m.size for m in bucket.tensors)]
        assert all(m.offset % ALIGNMENT == 0 and 0 <= m.offset - end < ALIGNMENT for m, end in zip(bucket.tensors, ends))
        assert bucket.size <= BUCKET or len(bucket.tensors) == 1
    where = {m.name: i for i, bucket in enumerate(buckets) for m in bucket.tensors}
    assert len({i for name, i in where.items() if ".mlp.experts." in name}) > 1


def test_training_may_go_on_while_weights_are_sent(sides):
    """What is registered is a copy: changing the model afterwards changes nothing of what the engine gets."""
    model, engine, sender, transport = sides
    expected = answers(Engine(copy.deepcopy(model), [999]))
    sender.register("a", model.state_dict().items())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    sender.update("a", [transport], 1)
    assert answers(engine) == expected


class Corrupting(LocalTransport):
    """Flips one bit of the nth bucket on its way."""

    def __init__(self, receiver, at):
        super().__init__(receiver)
        self.left = at

    def post(self, verb, args):
        if verb == "load":
            if self.left == 0:
                self.buffer(args[0])[args[1][0].offset] ^= 1
            self.left -= 1
        super().post(verb, args)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_corrupted_bucket_is_refused(at, sides, make_model):
    """One flipped bit in any bucket stops the sync on both sides with the tensor's name; no engine changes, not even a healthy one,
    and the next sync works."""
    model, engine, sender, transport = sides
    other = Engine(make_model(seed=2), [999], version=0)
    before = answers(engine), answers(other)
    with pytest.raises(K2Error, match=r"receiver 1: .*checksum .* is not the sender's"):
        sender.push(model.state_dict().items(), [transport, Corrupting(Receiver(other), at)], 1)
    assert (engine.version, other.version) == (0, 0)
    assert (answers(engine), answers(other)) == before
    sender.push(model.state_dict().items(), [transport, LocalTransport(Receiver(other))], 2)
    assert engine.version == other.version == 2 and answers(engine) == answers(other) != before[0]


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_of_another_model_are_refused(change, sides):
    """A tensor too few, too many or of another shape stops the sync before any weight changes, and says which."""
    model, engine, sender, transport = sides
    before, state = answers(engine), dict(model.state_dict())
    if change == "missing":
        del state["model.norm.weight"]
    elif change == "unknown":
        state["model.norm.bias"] = torch.zeros(64)
    else:
        state["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(K2Error, match="model.norm"):
        sender.push(state.items(), [transport], 1)
    assert engine.version == 0 and answers(engine) == before


def test_names_are_kept_apart(sides):
    """A name registered twice, or not at all, is an error; unregistering frees it."""
    model, _, sender, transport = sides
    sender.register("a", model.state_dict().items())
    with pytest.raises(K2Error, match="already registered"):
        sender.register("a", model.state_dict().items())
    with pytest.raises(K2Error, match="known: a"):
        sender.update("b", [transport], 1)
    sender.unregister("a")
    with pytest.raises(K2Error, match="known: none"):
        sender.gather("a")
    sender.register("a", model.state_dict().items())


def test_loading_overlaps_with_copying(sides):
    """While the receiver loads a bucket from one half, the sender already fills the other half with the next one."""
    model, _, sender, _ = sides
    filled = [threading.Event(), threading.Event()]
    overlapped = []

    class Waiting(Receiver):
        def load(self, half, tensors):
            filled[half].clear()
            if len(overlapped) < total - 1:  # a sender that waits for this load would never fill the other half
                overlapped.append(filled[1 - half].wait(10))
            super().load(half, tensors)

    class Watching(LocalTransport):
        def buffer(self, half):
            filled[half].set()
            return super().buffer(half)

    sender.register("a", model.state_dict().items())
    total = len(sender.gather("a"))
    sender.update("a", [Watching(Waiting(Engine(copy.deepcopy(model), [999])))], 1)
    assert total > 5 and overlapped == [True] * (total - 1)
