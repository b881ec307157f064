"""A grammar whose masks are dear costs its own request: others go on meanwhile, and its budget ends it with a reason."""

import asyncio
import threading
import time

import pytest
from fakes.spelled_grammars import TEXTS, expected, params_of, spelled_tokenizer
from fakes.speller import VOCAB
from fakes.stuttering_engine import END, MODEL, SIZES, STEPPING, serve

from mamba_align_jax import Engine, EngineConfig, Grammar, SamplingParams
from mamba_align_jax.engine.running.async_engine import AsyncEngine
from mamba_align_jax.engine.text import grammar_state
from mamba_align_jax.engine.text.grammar_state import GrammarCompiler, GrammarState
from mamba_align_jax.errors import GrammarError

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
pytestmark = pytest.mark.usefixtures("one_program")
BOMB = "((a{40}){40}){40}"
PROMPT = [0, 1, 0, 1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return spelled_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB, [END])


def test_a_bomb_is_dear_before_its_first_token(compiler):
    """And a usual grammar is cheap, also after many masks."""
    assert not compiler.start(Grammar("regex", BOMB)).is_cheap
    usual, tokens = compiler.start(Grammar("regex", "[ab]{3,90}")), []
    for _ in range(20):
        usual.allow(tokens, 0)
        assert usual.is_cheap
        tokens.append(0)


def test_the_first_mask_is_made_once_for_all_requests(compiler, monkeypatch):
    first = compiler.check(Grammar("regex", BOMB))
    monkeypatch.setattr(GrammarState, "_allow", None)
    states = [compiler.start(Grammar("regex", BOMB)) for _ in range(3)]
    masks = [state.allow(PROMPT, len(PROMPT))[1] for state in states]
    assert masks[0].tolist() == first.allow((), 0)[1].tolist()
    assert {state.cost_s for state in states} == {first.cost_s}, "each is charged for it"


def test_masks_cost_cpu_time_and_not_time(compiler, monkeypatch):
    """So a busy machine ends no request."""
    state, allow = compiler.start(Grammar("regex", "[ab]{3,9}")), GrammarState._allow
    before = state.cost_s
    monkeypatch.setattr(GrammarState, "_allow", lambda *args: time.sleep(0.5) or allow(*args))
    state.allow([0], 0)
    assert state.cost_s - before < 0.2


@pytest.mark.parametrize("stepping", ["plain", "drafts", "async"])
def test_a_request_over_its_budget_ends_with_the_reason(tokenizer, stepping, monkeypatch):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    monkeypatch.setattr(grammar_state, "_REQUEST_S", 0.2)
    monkeypatch.setattr(grammar_state, "_TOKEN_S", 0.0)
    usual = PROMPT, params_of("[ab]{3,9}")
    bomb, other = serve(engine, [(PROMPT, params_of(BOMB, max_tokens=50)), usual])
    assert type(bomb.error) is GrammarError
    assert "it is too complex" in str(bomb.error)
    assert "s of CPU time, and at most 0.2 s are allowed" in str(bomb.error)
    assert list(other.token_ids) == expected(*usual)
    if bomb.token_ids:
        assert {TEXTS[token] for token in bomb.token_ids} <= {"a"}


@pytest.mark.parametrize("stepping", ["plain", "async"])
def test_others_go_on_while_a_dear_mask_is_made(tokenizer, stepping, monkeypatch):
    """Those with cheap grammars too. The dear request goes on afterwards, with the same tokens."""
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    serve(engine, [(PROMPT, params_of("[ab]{3,9}", max_tokens=2)), ([3], SamplingParams(max_tokens=2))])  # compiles
    gate, allow = threading.Event(), GrammarState.allow

    def wait(self, tokens, start, drafts=()):
        if tokens[:start] == PROMPT and len(tokens) == start + 2:
            assert gate.wait(60), "the engine waits for the mask"
        return allow(self, tokens, start, drafts)

    monkeypatch.setattr(GrammarState, "allow", wait)
    monkeypatch.setattr(
        GrammarState,
        "is_cheap",
        property(lambda self: self._matcher is not engine.core.requests[dear].grammar._matcher),
    )
    dear_params = params_of("[ab]{3,9}")
    dear = engine.add_request(PROMPT, dear_params)
    others = [([5, 6], params_of("(ab|c){1,5}d?")), ([3], SamplingParams(max_tokens=9, ignore_eos=True))]
    ids, outputs = [engine.add_request(*one) for one in others], {}
    while not all(one in outputs for one in ids):
        outputs |= {output.request_id: output for output in engine.step()}
    assert dear not in outputs
    assert list(outputs[ids[0]].token_ids) == expected(*others[0])
    # Nothing but the mask is left to do: a step waits a while for it, and then lets its caller look around.
    for _ in range(3):
        assert engine.step() == []
    gate.set()
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert list(outputs[dear].token_ids) == expected(PROMPT, dear_params)
    assert engine.stats.preemptions == 0


def test_requests_with_dear_masks_hold_half_of_the_slots_at_most(tokenizer, monkeypatch):
    """Others overtake those that wait for a slot or for their first mask. All get their tokens."""
    engine = Engine(MODEL, EngineConfig(**SIZES | dict(max_num_seqs=2)), tokenizer=tokenizer)
    serve(engine, [(PROMPT, params_of("[ab]{3,9}", max_tokens=2)), ([3], SamplingParams(max_tokens=2))])  # compiles
    gate, allow = threading.Event(), GrammarState.allow
    dear_params = [params_of("[ab]{3,9}", tenant=tenant) for tenant in "abc"]
    dear = [engine.add_request(PROMPT, params) for params in dear_params]
    states = [engine.core.requests[one].grammar for one in dear]

    def wait(self, tokens, start, drafts=()):
        if self in states:
            assert gate.wait(300), "the engine waits for a mask"
        return allow(self, tokens, start, drafts)

    monkeypatch.setattr(GrammarState, "allow", wait)
    monkeypatch.setattr(GrammarState, "is_cheap", property(lambda self: self not in states))
    usual = [([3], SamplingParams(max_tokens=4, ignore_eos=True)), ([5, 6], params_of("(ab|c){1,5}d?"))]
    outputs = {}

    def finish(ids):
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if all(one in outputs for one in ids):
                return
            outputs.update({output.request_id: output for output in engine.step()})
            running = [request.id for request in engine.core.scheduler.running]
            assert len({*running} & {*dear}) <= 1
        raise AssertionError("no progress")

    finish([engine.add_request(*one) for one in usual])
    assert not outputs.keys() & {*dear}
    gate.set()
    finish(dear)
    for one, params in zip(dear, dear_params, strict=True):
        assert list(outputs[one].token_ids) == expected(PROMPT, params)


def test_a_dear_mask_of_a_request_that_is_aborted_is_not_made(tokenizer, monkeypatch):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING["plain"]), tokenizer=tokenizer)
    gate, begun, made, allow = threading.Event(), threading.Event(), [], GrammarState.allow

    def wait(self, tokens, start, drafts=()):
        if len(tokens) > start:
            begun.set()
            assert gate.wait(60)
            made.append(self)
        return allow(self, tokens, start, drafts)

    monkeypatch.setattr(GrammarState, "allow", wait)
    monkeypatch.setattr(GrammarState, "is_cheap", False)
    ids = [engine.add_request(PROMPT, params_of("[ab]{3,9}", tenant=tenant)) for tenant in "ab"]
    while not begun.is_set():
        engine.step()
    for one in ids:
        engine.abort(one)
    gate.set()
    serve(engine, [(PROMPT, params_of("[ab]{3,9}", max_tokens=2))])
    assert len(made) == 2, "the one that had begun, and that of the last request"


def test_grammars_are_never_compiled_by_the_engines_thread(tokenizer, monkeypatch):
    """Also where many others are compiled meanwhile."""
    engine, threads = Engine(MODEL, EngineConfig(**SIZES), tokenizer=tokenizer), []
    compile_ = GrammarCompiler._compile
    monkeypatch.setattr(grammar_state, "_MAX_KEPT", 1)
    monkeypatch.setattr(
        GrammarCompiler,
        "_compile",
        lambda self, grammar: threads.append(threading.current_thread().name) or compile_(self, grammar),
    )

    async def ask():
        async with AsyncEngine(engine) as serving:

            async def one(pattern):
                return [update async for update in serving.generate(PROMPT, params_of(pattern, max_tokens=3))]

            await asyncio.gather(*(one(f"[ab]{{3,{number}}}") for number in range(4, 50)))

    asyncio.run(ask())
    assert len(threads) == 46
    assert "mamba-align engine" not in threads
