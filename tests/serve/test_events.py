"""Cache events on ZMQ: pages in vLLM's messages, states apart from them, and nothing missing for a reader that is late."""

import argparse
import contextlib
import itertools
import sys
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from fakes.http import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import SamplingParams
from mamba_align_jax.cache.events import CacheCleared, PageRemoved, PageStored, StateRemoved, StateStored
from mamba_align_jax.routing import CacheMirror, Reach, StateRouter
from mamba_align_jax.serve.events import reader as event_reader
from mamba_align_jax.serve.events.options import add_event_options, event_listener
from mamba_align_jax.serve.events.publisher import EventPublisher
from mamba_align_jax.serve.events.reader import EventReader
from mamba_align_jax.serve.events.stream import decode, encode

ANY_PORT = "tcp://127.0.0.1:*"
PAGES = [PageStored(11, None, (1, 2), b"tenant"), PageStored(12, 11, (3, 4), b"tenant"), PageStored(22, 21, (5, 6))]
EVENTS = [CacheCleared(), *PAGES, StateStored(12, 4), PageRemoved(22), PageRemoved(21), StateRemoved(12)]
PATIENCE = 300

imported = st.builds(PageStored, st.integers(0, 9), st.none(), st.just(()))
page = imported | st.builds(PageStored, st.integers(0, 9), st.none() | st.integers(0, 9), st.just((1, 2)))
events = st.lists(
    st.one_of(
        page,
        st.builds(PageRemoved, st.integers(0, 9)),
        st.builds(StateStored, st.integers(0, 9), st.integers(1, 9)),
        st.builds(StateRemoved, st.integers(0, 9)),
        st.just(CacheCleared()),
    ),
    min_size=1,
    max_size=6,
)


def mirror_of(batches):
    mirror = CacheMirror()
    for batch in batches:
        mirror.apply(batch)
    return mirror


@pytest.fixture
def publishers():
    made = []

    def make(replay=ANY_PORT, **options):
        options.setdefault("states", True)
        made.append(EventPublisher(options.pop("endpoint", ANY_PORT), replay, **options))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


@pytest.fixture
def readers():
    made = []

    def make(publisher, replay=True, **options):
        made.append(EventReader(publisher.endpoint, publisher.replay_endpoint if replay else None, **options))
        return made[-1]

    yield make
    for reader in made:
        reader.close()


@pytest.fixture
def sockets(tmp_path):
    """Makes the sockets of a publisher, and a reader that has subscribed."""
    with contextlib.ExitStack() as stack:

        def make(with_replay):
            contexts = (stack.enter_context(zmq.Context()) for _ in range(2))
            kinds = (zmq.XPUB, zmq.ROUTER)
            live, replay = (stack.enter_context(c.socket(kind)) for c, kind in zip(contexts, kinds, strict=True))
            endpoints = [f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay"]
            for socket, endpoint in zip((live, replay), endpoints, strict=True):
                socket.linger = 0
                socket.bind(endpoint)
            reader = EventReader(*endpoints[: 1 + with_replay])
            stack.callback(reader.close)
            assert live.poll(1000 * PATIENCE)
            live.recv()
            return live, replay, reader

        yield make


def publish(live, *batches):
    """Sends batches with their numbers and times."""
    for number, moment, events in batches:
        live.send_multipart([b"", number.to_bytes(8, "big"), encode(moment, events, states=True)])


def asked(replay):
    """Returns who asks for batches, and from which number on."""
    assert replay.poll(1000 * PATIENCE)
    name, empty, number = replay.recv_multipart()
    assert empty == b""
    return name, int.from_bytes(number, "big")


def answer(replay, name, *parts):
    for number, payload in parts:
        replay.send_multipart([name, b"", b"", number.to_bytes(8, "big", signed=True), payload])


def read_until(reader, mirror, wanted):
    end = time.monotonic() + PATIENCE
    while mirror != wanted and time.monotonic() < end:
        mirror.apply(reader.read(0.2))
    assert mirror == wanted


def read_and_answer(replay, reader, mirror, wanted, parts):
    """Reads until `wanted` is known, and answers the questions that come meanwhile."""
    end = time.monotonic() + PATIENCE
    while mirror != wanted and time.monotonic() < end:
        while replay.poll(0):
            name, start = asked(replay)
            answer(replay, name, *parts[start:])
        mirror.apply(reader.read(0.05))
    assert mirror == wanted


# The fields and their order are those of vLLM's `kv_events.py` in September 2026.
def test_a_batch_for_vllms_readers_has_vllms_messages_alone():
    stored = dict(type="BlockStored", lora_id=None, medium="GPU", lora_name=None, block_size=2)
    group = dict(group_idx=0, kv_cache_spec_kind="full_attention")
    assert msgspec.msgpack.decode(encode(1.5, EVENTS, states=False)) == [
        1.5,
        [
            dict(type="AllBlocksCleared"),
            stored
            | dict(block_hashes=[11, 12], parent_block_hash=None, token_ids=[1, 2, 3, 4], extra_keys=[["tenant"], None])
            | group,
            stored | dict(block_hashes=[22], parent_block_hash=21, token_ids=[5, 6]) | group,
            dict(type="BlockRemoved", block_hashes=[22, 21], medium="GPU", group_idx=0),
        ],
        0,
    ]
    # Readers of vLLM's kinds make nothing of a page without tokens.
    imported = [StateStored(12, 4), StateRemoved(12), PageStored(7, None, ())]
    assert encode(1.5, imported, states=False) is None
    assert decode(encode(1.5, imported, states=True))[1] == tuple(imported)


class VllmBlockStored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class VllmBlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class VllmAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class VllmBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]
    data_parallel_rank: int | None = None


def test_a_strict_reader_takes_the_stream_of_pages_and_would_fail_at_states():
    strict = msgspec.msgpack.Decoder(VllmBatch)
    batch = strict.decode(encode(1.5, EVENTS, states=False))
    assert [type(event).__name__ for event in batch.events] == [
        *("VllmAllBlocksCleared", "VllmBlockStored", "VllmBlockStored", "VllmBlockRemoved")
    ]
    with pytest.raises(msgspec.ValidationError, match="StateStored"):
        strict.decode(encode(1.5, EVENTS, states=True))


@given(events)
def test_what_is_decoded_is_what_was_encoded(some):
    moment, again = decode(encode(2.0, some, states=True))
    assert (moment, list(again)) == (2.0, some)


def test_messages_of_vllm_are_decoded_and_others_are_refused():
    stored = VllmBlockStored([5], None, [1], 1, None, "GPU", None, session_id="s", locality="LOCAL")
    payload = msgspec.msgpack.encode([1.0, [stored, VllmAllBlocksCleared()]])
    assert decode(payload) == (1.0, (PageStored(5, None, (1,)), CacheCleared()))
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]])):
        with pytest.raises(ValueError, match="decode: payload must be a batch of cache events"):
            decode(wrong)


def test_a_message_has_three_parts(publishers):
    publisher = publishers(topic="kv@pod@model")
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(publisher.replay_endpoint)
        for batch in ([CacheCleared()], [PAGES[0]], [StateStored(11, 2)]):
            publisher.publish(tuple(batch))
        found = []
        while len(found) < 3:  # Until the thread has sent all three.
            found = []
            replay.send_multipart([b"", (0).to_bytes(8, "big")])
            while found[-1:] != [[b"", b"", b"\xff" * 8, b""]]:
                assert replay.poll(1000 * PATIENCE)
                found.append(replay.recv_multipart())
            found.pop()
        assert [parts[:3] for parts in found] == [[b"", b"kv@pod@model", n.to_bytes(8, "big")] for n in range(3)]
        assert decode(found[1][3])[1] == (PageStored(11, None, (1, 2)),)


@settings(max_examples=12, deadline=None)
@given(st.lists(events, min_size=1, max_size=12), st.integers(1, 14), st.data())
def test_a_reader_knows_the_cache_however_late_it_comes_and_however_little_is_kept(batches, kept, data):
    """Batches that are too old are replaced by what was cached after them. The reader reads with gaps."""
    late = data.draw(st.integers(0, len(batches)))
    publisher = EventPublisher(ANY_PORT, ANY_PORT, states=True, max_batches=kept)
    reader = None
    try:
        mirror = CacheMirror()
        for number, batch in enumerate(batches):
            if number == late:
                reader = EventReader(publisher.endpoint, publisher.replay_endpoint)
            publisher.publish(tuple(batch))
            if reader is not None and number % 3 == 0:
                mirror.apply(reader.read(0.01))
        reader = reader or EventReader(publisher.endpoint, publisher.replay_endpoint)
        read_until(reader, mirror, mirror_of(batches))
    finally:
        publisher.close()
        if reader is not None:
            reader.close()


def test_a_lost_batch_is_asked_for_again(publishers, readers):
    publisher = publishers()
    reader, mirror = readers(publisher), CacheMirror()
    publisher.publish((CacheCleared(), PAGES[0]))
    read_until(reader, mirror, mirror_of([PAGES[:1]]))
    for batch in ((PAGES[1],), (StateStored(12, 4),), (PageRemoved(11),)):
        publisher.publish(batch)
        if batch == (PAGES[1],):
            # What the socket would have brought is thrown away.
            assert reader._socket.poll(1000 * PATIENCE)
            reader._socket.recv_multipart()
    read_until(reader, mirror, CacheMirror({12}, {12: 4}))


@pytest.mark.parametrize("timeout_s", [0, 0.001, 0.05])
def test_an_answer_in_pieces_loses_nothing(sockets, timeout_s):
    """An answer that comes slowly is read in pieces, each by another call."""
    batches = [(CacheCleared(), PAGES[0]), (PAGES[1],), (StateStored(12, 4),)]
    pieces = [(number, encode(1.0, batch, states=True)) for number, batch in enumerate(batches)]
    _, replay, reader = sockets(with_replay=True)
    mirror, (name, start) = CacheMirror(), asked(replay)
    assert start == 0
    for number, payload in [*pieces, (-1, b"")]:
        answer(replay, name, (number, payload))
        end = time.monotonic() + PATIENCE
        while reader._next <= number and time.monotonic() < end:
            mirror.apply(reader.read(timeout_s))
        mirror.apply(reader.read(timeout_s))
    assert mirror == mirror_of(batches)


def test_a_silent_replay_socket_is_asked_again_from_where_the_answer_broke_off(monkeypatch, sockets):
    monkeypatch.setattr(event_reader, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(event_reader, "_LONGEST_PATIENCE_S", 0.02)
    _, replay, reader = sockets(with_replay=True)
    starts, end = [], time.monotonic() + PATIENCE
    while starts[-1:] != [1] and time.monotonic() < end:
        # An answer goes to the socket that asked, so it is late if that has been given up.
        name, start = asked(replay)
        starts.append(start)
        answer(replay, name, (0, encode(1.0, (PAGES[0],), states=True)))
        reader.read(0.05)
    assert starts[-1:] == [1]
    assert set(starts) <= {0, 1}


def test_a_new_engine_whose_first_batch_is_lost_makes_a_reader_forget(sockets):
    live, _, reader = sockets(with_replay=False)
    publish(live, (0, 1.0, PAGES[:1]), (1, 2.0, PAGES[1:2]))
    assert reader.read(PATIENCE) == (PageStored(11, None, (1, 2)),)
    assert reader.read(PATIENCE) == (PageStored(12, 11, (3, 4)),)
    publish(live, (1, 3.0, [PAGES[2]]))
    assert reader.read(PATIENCE) == (CacheCleared(), PAGES[2])


@pytest.mark.parametrize("with_replay", [False, True])
def test_a_new_engine_that_has_published_as_many_batches_is_noticed(sockets, with_replay):
    live, replay, reader = sockets(with_replay)
    if with_replay:
        answer(replay, asked(replay)[0], (-1, b""))
    publish(live, (0, 1.0, PAGES[:1]))
    mirror = CacheMirror()
    read_until(reader, mirror, mirror_of([PAGES[:1]]))
    endpoint = live.get_string(zmq.LAST_ENDPOINT)
    live.context.destroy(linger=0)  # It returns when the address is free again.
    with zmq.Context() as context, context.socket(zmq.XPUB) as other:
        other.linger = 0
        other.bind(endpoint)
        end = time.monotonic() + PATIENCE
        while not other.poll(0) and time.monotonic() < end:  # A subscription is renewed while a reader reads.
            assert reader.read(0.01) == ()
        # Its batch 0 came before that.
        publish(other, (1, 2.0, PAGES[2:]))
        parts = (0, encode(1.5, [PAGES[1]], states=True)), (1, encode(2.0, PAGES[2:], states=True)), (-1, b"")
        read_and_answer(replay, reader, mirror, mirror_of([PAGES[2 - with_replay :]]), parts)


def test_what_came_before_the_subscription_is_asked_for_again(monkeypatch, sockets):
    monkeypatch.setattr(event_reader, "_PATIENCE_S", 0.01)
    _, replay, reader = sockets(with_replay=True)
    end = time.monotonic() + PATIENCE
    while reader._replay is not None and time.monotonic() < end:
        while replay.poll(0):
            answer(replay, asked(replay)[0], (-1, b""))  # Nothing was published yet.
        assert reader.read(0) == ()
    assert reader._replay is None
    parts = (0, encode(1.0, PAGES[:1], states=True)), (-1, b"")
    read_and_answer(replay, reader, CacheMirror(), mirror_of([PAGES[:1]]), parts)


def test_what_an_answer_leaves_out_makes_a_reader_forget(sockets):
    _, replay, reader = sockets(with_replay=True)
    answer(replay, asked(replay)[0], (5, encode(1.0, PAGES[2:], states=True)), (-1, b""))
    assert reader.read(PATIENCE) == (CacheCleared(), PAGES[2])


def test_a_batch_that_is_none_loses_nothing_beside_it(sockets):
    _, replay, reader = sockets(with_replay=True)
    good = [encode(float(number), [StateStored(number, 1)], states=True) for number in range(3)]
    answer(replay, asked(replay)[0], (0, good[0]), (1, b"\xc1"), (2, good[2]), (-1, b""))
    assert reader.read(PATIENCE) == (StateStored(0, 1),)
    answer(replay, asked(replay)[0], (1, b"\xc1"), (2, good[2]), (-1, b""))
    with pytest.raises(ValueError, match="must be a batch of cache events"):
        reader.read(PATIENCE)
    assert reader.read(PATIENCE) == (StateStored(2, 1),)


def test_a_gap_without_a_replay_socket_forgets_what_was_known(publishers, readers):
    publisher = publishers(replay=None)
    reader, mirror = readers(publisher, replay=False), CacheMirror()
    # A subscription takes some time to arrive.
    for number in itertools.count():
        publisher.publish((PageStored(number, None, (1,)),))
        mirror.apply(reader.read(0.05))
        if len(mirror.pages) > 1:
            break
        assert number < 20 * PATIENCE
    publisher.publish((PageStored(10**6, None, (1,)),))
    while reader._next <= number:
        mirror.apply(reader.read(PATIENCE))
    assert reader._socket.poll(1000 * PATIENCE)
    reader._socket.recv_multipart()
    publisher.publish((PageStored(10**6 + 1, None, (1,)),))
    assert reader.read(PATIENCE) == (CacheCleared(), PageStored(10**6 + 1, None, (1,)))


def test_a_reader_goes_on_with_an_engine_that_starts_anew(tmp_path, publishers, readers):
    where = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"]
    first = publishers(endpoint=where[0], replay=where[1])
    reader, mirror = readers(first), CacheMirror()
    for each in PAGES:
        first.publish((each,))
    read_until(reader, mirror, mirror_of([PAGES]))
    first.close()
    second = publishers(endpoint=where[0], replay=where[1])
    end = time.monotonic() + PATIENCE
    second.publish((CacheCleared(),))
    # A reader notices at the next message that reaches it.
    while mirror.pages != {33} and time.monotonic() < end:
        second.publish((PageStored(33, None, (9,)),))
        mirror.apply(reader.read(0.2))
    assert mirror.pages == {33}


@pytest.mark.parametrize("with_replay", [False, True])
def test_what_a_dead_engine_had_sent_is_not_taken_for_a_new_ones(tmp_path, publishers, readers, with_replay):
    """An unread batch of the dead engine has the number that the reader expects next of the new engine."""
    where = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay" if with_replay else None]
    first = publishers(endpoint=where[0], replay=where[1])
    reader, mirror = readers(first), CacheMirror()
    end = time.monotonic() + PATIENCE
    first.publish((CacheCleared(), PageStored(11, None, (1,))))
    while not mirror.pages and time.monotonic() < end:
        mirror.apply(reader.read(0.1))
        if not with_replay:  # A subscription takes some time to arrive.
            first.publish((CacheCleared(), PageStored(11, None, (1,))))
    while events := reader.read(0.3):
        mirror.apply(events)
    assert mirror.pages == {11}
    first.publish((PageStored(12, 11, (2,)),))
    assert reader._socket.poll(1000 * PATIENCE)
    first.close()
    # A reader that reads before it can know of the engine's death is right to take the batch.
    assert reader._disconnections.poll(1000 * PATIENCE)
    second = publishers(endpoint=where[0], replay=where[1])
    second.publish((CacheCleared(), PageStored(33, None, (9,))))
    while mirror.pages != {33} and time.monotonic() < end:
        mirror.apply(reader.read(0.1))
        assert 12 not in mirror.pages
        if not with_replay:
            second.publish((PageStored(33, None, (9,)),))
    mirror.apply(reader.read(0.3))
    assert mirror.pages == {33}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            dict(endpoint="tcp://nowhere"),
            "EventPublisher: endpoint must be a ZMQ address that is free, got 'tcp://nowhere'",
        ),
        (dict(endpoint=5), "EventPublisher: endpoint must be text, got 5"),
        (dict(replay="udp://*:1"), "EventPublisher: replay_endpoint must be a ZMQ address that is free, got 'udp://"),
        (dict(topic=b"x"), "EventPublisher: topic must be text"),
        (dict(max_batches=0), "EventPublisher: max_batches must be"),
        (dict(states="yes"), "EventPublisher: states must be True or False"),
    ],
)
def test_bad_arguments_of_a_publisher_are_refused(publishers, arguments, said):
    with pytest.raises(ValueError, match=said):
        publishers(**arguments)


def test_a_port_that_is_taken_is_refused(publishers):
    taken = publishers().endpoint.replace("127.0.0.1", "*")
    with pytest.raises(ValueError, match="is free, got 'tcp://\\*"):
        publishers(endpoint=taken)


def test_a_reader_refuses_what_is_no_address():
    with pytest.raises(ValueError, match="EventReader: endpoint must be a ZMQ address, got 'nowhere'"):
        EventReader("nowhere")
    for wrong, wanted in (("nowhere", "a ZMQ address, got 'nowhere'"), (5, "text, got 5")):
        with pytest.raises(ValueError, match=f"EventReader: replay_endpoint must be {wanted}"):
            EventReader("tcp://127.0.0.1:5", wrong)


def test_nonsense_at_the_replay_socket_is_ignored(publishers, readers, caplog):
    publisher = publishers()
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(publisher.replay_endpoint)
        replay.send_multipart([b"", b"all of it"])
        replay.send_multipart([b"x"])
        publisher.publish((PAGES[0],))
        read_until(readers(publisher), CacheMirror(), mirror_of([PAGES[:1]]))


def options(*arguments):
    parser = argparse.ArgumentParser()
    add_event_options(parser)
    return parser.parse_args(arguments)


def test_the_command_publishes_pages_at_one_address_and_states_at_another(tmp_path):
    where = {name: f"ipc://{tmp_path}/{name}" for name in ("kv", "kv-replay", "state", "state-replay")}
    given = [f"--{name.split('-')[0]}-events{'-replay' if '-' in name else ''}={at}" for name, at in where.items()]
    with event_listener(options(*given, "--events-topic", "kv@pod@model")) as publish:
        publish((CacheCleared(), PAGES[0], StateStored(11, 2)))
        for name, states in (("kv", {}), ("state", {11: 2})):
            reader = EventReader(where[name], where[f"{name}-replay"], "kv@")
            read_until(reader, CacheMirror(), CacheMirror({11}, states))
            reader.close()


def test_without_options_nothing_is_published():
    with event_listener(options()) as publish:
        assert publish is None


def test_a_replay_address_alone_is_refused():
    with (
        pytest.raises(ValueError, match="state_events_replay must come with state_events, got 'tcp://\\*:1' alone"),
        event_listener(options("--state-events-replay", "tcp://*:1")),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("--kv-events", ["--kv-events", "nowhere"]),
        ("--kv-events-replay", ["--kv-events", ANY_PORT, "--kv-events-replay", "nowhere"]),
        ("--state-events-replay", ["--state-events", ANY_PORT, "--state-events-replay", "nowhere"]),
    ],
)
def test_an_address_that_is_none_is_refused_by_the_name_of_its_option(name, given):
    with (
        pytest.raises(ValueError, match=f"^{name} must be a ZMQ address that is free, got 'nowhere'"),
        event_listener(options(*given)),
    ):
        pass


def test_events_without_their_packages_are_refused_by_the_name_of_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_align_jax.serve.events.publisher", None)
    with pytest.raises(ValueError, match="need the extra 'events'"), event_listener(options("--kv-events", ANY_PORT)):
        pass


def test_a_reader_may_listen_and_publishers_connect():
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.linger = 0
        reader.subscribe("")
        reader.bind(ANY_PORT)
        where = reader.get(zmq.LAST_ENDPOINT).decode()
        publisher = EventPublisher(where, states=False, connect=True)
        try:
            end = time.monotonic() + PATIENCE
            while not reader.poll(20) and time.monotonic() < end:
                publisher.publish((PAGES[0],))
            assert decode(reader.recv_multipart()[2])[1] == (PageStored(11, None, (1, 2)),)
        finally:
            publisher.close()


def test_a_served_engine_tells_routers_what_it_has_cached(engine, tmp_path):
    """A router that reads the socket knows from how many tokens a prompt would start, before it is sent."""
    where = f"ipc://{tmp_path}/events"
    prompt = np.random.default_rng(0).integers(0, 200, 150).tolist()
    with event_listener(options("--state-events", where, "--state-events-replay", where + "-replay")) as publish:
        engine.on_cache_event(publish)
        reader = EventReader(where, where + "-replay")
        try:
            engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
            router = StateRouter(["only"], engine.config.kv_page_size)
            wanted = engine.cached_prefix(prompt).num_tokens
            end = time.monotonic() + PATIENCE
            while router.reaches(prompt)["only"].num_resumable_tokens != wanted and time.monotonic() < end:
                router.apply("only", reader.read(0.2))
            assert router.reaches(prompt)["only"].num_resumable_tokens == wanted > 0
            assert router.reaches(prompt, b"salt")["only"] == Reach(0, 0)
            assert engine.generate(prompt, SamplingParams(max_tokens=1))[0].num_cached_tokens == wanted
        finally:
            engine.on_cache_event(None)
            reader.close()


@contextlib.contextmanager
def asking(publisher):
    """A socket that asks for batches again."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.replay_endpoint)
        yield socket


def test_what_is_published_waits_for_a_share_of_an_answer_only(publishers, readers):
    """A stranger asks for everything, again and again, and reads nothing."""
    publisher, count = publishers(), 3000
    for number in range(count):
        publisher.publish((PageRemoved(number),))
    wait_until(lambda: publisher._sequence == count)
    reader = readers(publisher, replay=False)
    with asking(publisher) as stranger:
        stranger.send_multipart([b"", (0).to_bytes(8, "big")])
        assert stranger.poll(1000 * PATIENCE)
        sent = []
        publisher._replay = Counting(publisher._replay, sent)
        for _ in range(50):
            stranger.send_multipart([b"", (0).to_bytes(8, "big")])
        found, before = (), 0
        while not found:
            before = len(sent)
            publisher.publish((PageStored(5, None, (1,)),))
            found = reader.read(0.2)
        # Only what goes out while the batch travels.
        assert len(sent) - before < count
    with asking(publisher) as other:
        other.send_multipart([b"", (count - 1).to_bytes(8, "big")])
        numbers = []
        while numbers[-1:] != [-1]:
            assert other.poll(1000 * PATIENCE)
            numbers.append(int.from_bytes(other.recv_multipart()[2], "big", signed=True))
    assert numbers[:-1] == list(range(count - 1, count - 1 + len(numbers) - 1))


class Counting:
    """A socket that notes what it sends."""

    def __init__(self, socket, sent):
        self._socket, self._sent = socket, sent

    def __getattr__(self, name):
        return getattr(self._socket, name)

    def send_multipart(self, parts):
        self._sent.append(parts)
        self._socket.send_multipart(parts)


def test_readers_are_answered_in_turn(publishers):
    publisher = publishers()
    for number in range(1000):
        publisher.publish((PageRemoved(number),))
    wait_until(lambda: publisher._sequence == 1000)
    with asking(publisher) as first, asking(publisher) as second:
        first.send_multipart([b"", (0).to_bytes(8, "big")])
        assert first.poll(1000 * PATIENCE)
        first.send_multipart([b"", (0).to_bytes(8, "big")])
        second.send_multipart([b"", (0).to_bytes(8, "big")])
        for socket in (first, second):
            numbers = []
            while numbers[-1:] != [-1]:
                assert socket.poll(1000 * PATIENCE)
                numbers.append(int.from_bytes(socket.recv_multipart()[2], "big", signed=True))
            assert numbers[-1001:-1] == list(range(1000))


def test_a_request_that_is_too_large_is_not_read(publishers, caplog):
    """What sends it is disconnected before the frame has come, which may have a gigabyte."""
    publisher = publishers()
    with asking(publisher) as stranger, asking(publisher) as reader:
        lost = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        stranger.send_multipart([b"", b"x" * 2**20])
        assert lost.poll(1000 * PATIENCE)
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        assert reader.poll(1000 * PATIENCE)
        stranger.disable_monitor()
        lost.close()
    assert "something else" not in caplog.text
