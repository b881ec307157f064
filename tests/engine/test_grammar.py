"""Structured output matches its grammar, and every token is the best of those that the grammar allows."""

import dataclasses
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes.engines import launch_ahead
from fakes.spelled_grammars import LANGUAGES, TEXTS, allowed, expected, params_of, spelled_tokenizer
from fakes.speller import VOCAB, next_tokens
from fakes.stuttering_engine import END, MODEL, SIZES, STEPPING, STUTTER, serve

from mamba_align_jax import Engine, EngineConfig, Grammar, SamplingParams
from mamba_align_jax.engine.running import core
from mamba_align_jax.engine.text.grammar_state import GrammarCompiler, GrammarState
from mamba_align_jax.errors import GrammarError

pytest.importorskip("llguidance", reason="needs the extra 'structured'")
pytestmark = pytest.mark.usefixtures("one_program")
# Only one text matches. llguidance then allows only the tokens into which it would cut that text itself.
FORCED = "aaaaaaaaaaaaaaaab"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3, "pattern": "^[a-f]*$"},
        "ok": {"type": "boolean"},
        "n": {"enum": [1, 25, 3]},
    },
    "required": ["name", "ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return spelled_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def asked(rng):
    """Prompts of a's and b's, whose repetitions drafts find, and each prompt twice so that the second one may hit."""
    prompts = [rng.choice([0, 1, TEXTS.index("ab")], n).tolist() for n in (21, 25, 30, 9)]
    return prompts + prompts[:3]


def text_of(output):
    return "".join(TEXTS[token] for token in output.token_ids if token != END)


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_allow_what_continues_a_string_of_the_language(tokenizer, rng, pattern):
    """Also after drafts, of which those up to the first that is not allowed are kept, and with several end tokens."""
    ends, language = (END, VOCAB - 1), LANGUAGES[pattern]
    compiler = GrammarCompiler(tokenizer, VOCAB, ends)
    state, prompt = compiler.start(Grammar("regex", pattern)), [5, 6]
    tokens, cut = list(prompt), 0
    for _ in range(40):
        text = "".join(TEXTS[token] for token in tokens[2:])
        drafts = []
        for _ in range(3):
            after = text + "".join(TEXTS[draft] for draft in drafts)
            may = [token for token in allowed(after, language) if token != END] or [9]
            drafts.append(int(rng.choice(may)) if rng.random() < 0.8 else int(rng.choice([END, rng.integers(VOCAB)])))
        kept, masks = state.allow(tokens, len(prompt), drafts)
        assert kept == drafts[: len(kept)]
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert masks.shape == (1 + len(kept), 2)
        for place, row in enumerate(bits):
            after = text + "".join(TEXTS[draft] for draft in drafts[:place])
            assert np.flatnonzero(row).tolist() == allowed(after, language, ends)
        if len(kept) < 3:
            cut += 1
            assert not row[drafts[len(kept)]] or drafts[len(kept)] in ends
        may = [token for token in allowed(text, language) if token != END]
        # A request goes on, or returns to fewer tokens: what was read of it may have been cut off.
        tokens = (
            [*tokens, int(rng.choice(may))]
            if may and rng.random() < 0.9
            else tokens[: rng.integers(2, len(tokens) + 1)]
        )
        if rng.random() < 0.1:
            state._num_read = None
    assert cut


@pytest.mark.parametrize("stepping", STEPPING)
def test_greedy_tokens_are_the_best_that_are_allowed(tokenizer, rng, stepping):
    """Requests with and without grammars run side by side. Those without generate what they generate alone."""
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    plain = SamplingParams(max_tokens=18, ignore_eos=True)
    kinds = [params_of(pattern) for pattern in (*LANGUAGES, FORCED)]
    kinds += [params_of("[ab]{3,9}", repetition_penalty=1.5, frequency_penalty=0.75, logprobs=1), plain]
    kinds += [params_of("[ab]{3,9}", max_tokens=2, prompt_logprobs=1)]
    requests = [(prompt, params) for prompt in asked(rng) for params in kinds]
    outputs = serve(engine, requests)
    for (prompt, params), output in zip(requests, outputs, strict=True):
        if params is plain:
            assert list(output.token_ids) == next_tokens([*prompt, *output.token_ids[:-1]], STUTTER)[len(prompt) - 1 :]
            continue
        if params.grammar.text == FORCED:
            assert output.finish_reason == "stop"
        else:
            assert list(output.token_ids) == expected(prompt, params)
        if output.finish_reason == "stop":
            assert re.fullmatch(params.grammar.text, text_of(output))
            assert output.text == text_of(output)
    assert any(output.num_cached_tokens for output in outputs) == (stepping != "uncached")
    constrained = [output for output, (_, params) in zip(outputs, requests, strict=True) if params.grammar]
    assert (sum(output.num_accepted_tokens for output in constrained) > 0) == (stepping == "drafts")
    if stepping == "async_drafts":
        assert not sum(output.num_draft_tokens for output in constrained)
        assert sum(output.num_accepted_tokens for output in outputs) > 0


@pytest.mark.parametrize("stepping", ["plain", "drafts", "async_drafts"])
def test_drawn_text_is_json_of_the_schema(tokenizer, rng, stepping):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    grammar, seen = Grammar("json_schema", json.dumps(SCHEMA)), set()
    requests = [
        (rng.integers(0, VOCAB, 4).tolist(), SamplingParams(temperature=500.0, seed=n, grammar=grammar, max_tokens=55))
        for n in range(12)
    ]
    for output in serve(engine, requests):
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            found = json.loads(output.text)
            assert found.keys() == SCHEMA["properties"].keys()
            assert type(found["ok"]) is bool
            assert re.fullmatch("[a-f]{0,3}", found["name"])
            assert found["n"] in (1, 25, 3)
            seen.add(output.text)
    assert len(seen) > 3


def test_json_has_at_most_one_space_between_its_parts(tokenizer):
    """A model that likes spaces would write nothing else."""
    state = GrammarCompiler(tokenizer, VOCAB, [END]).start(Grammar("json_object"))
    space, brace = TEXTS.index(" "), TEXTS.index("{")
    assert state.allow([], 0, [brace, space, space])[0] == [brace, space]


@pytest.mark.parametrize("stepping", ["plain", "async_drafts"])
def test_tokens_are_the_same_after_an_interrupt(tokenizer, rng, stepping, monkeypatch):
    """The interrupt comes in the middle of llguidance's work for a row."""
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    requests = [(prompt, params_of("[ab]{3,9}")) for prompt in asked(rng)]
    check, calls = GrammarState._check, itertools.count()

    def cut_off(self, success):
        if next(calls) % 9 == 8:
            raise KeyboardInterrupt
        check(self, success)

    monkeypatch.setattr(GrammarState, "_check", cut_off)
    for (prompt, params), output in zip(requests, serve(engine, requests), strict=True):
        assert list(output.token_ids) == expected(prompt, params)
    assert engine.stats.preemptions > 3


@pytest.mark.parametrize("stepping", ["plain", "async_drafts"])
def test_grammar_that_fails_ends_only_its_request(tokenizer, rng, stepping, monkeypatch):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    requests = [(prompt, params_of("[ab]{3,9}")) for prompt in asked(rng)[:3]]
    allow = GrammarState.allow

    def fail(self, tokens, start, drafts=()):
        if tokens[:start] == requests[1][0] and len(tokens) == start + 2:
            raise RuntimeError("grammar: too complex")
        return allow(self, tokens, start, drafts)

    monkeypatch.setattr(GrammarState, "allow", fail)
    first, second, third = serve(engine, requests)
    assert (second.finish_reason, str(second.error)) == ("error", "grammar: too complex")
    assert list(first.token_ids) == expected(*requests[0])
    assert list(third.token_ids) == expected(*requests[2])


@pytest.mark.parametrize("ahead", [False, True])
def test_constrained_request_runs_in_every_other_asynchronous_step(tokenizer, ahead, monkeypatch):
    """Its next step needs the token of the last one, also with two steps in flight. Another request runs in every step."""
    if ahead:
        launch_ahead(monkeypatch)
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING["async"]), tokenizer=tokenizer)
    rows, dispatched = [], core.Scheduler.dispatched
    engine.scheduler.dispatched = lambda plan: (
        rows.append([row.request.id for row in plan.rows]) or dispatched(engine.scheduler, plan)
    )
    serve(engine, [([1, 2, 3], params_of(FORCED)), ([1, 2], SamplingParams(max_tokens=30, ignore_eos=True))])
    assert [0 in ids for ids in rows[:12]] == [True, False] * 6
    assert all(1 in ids for ids in rows[:12])


def test_grammar_may_be_compiled_in_one_thread_and_used_in_another(tokenizer, rng):
    compiler, grammar = GrammarCompiler(tokenizer, VOCAB, [END]), Grammar("regex", "[ab]{3,9}")
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            list(pool.map(compiler.check, [grammar, Grammar("regex", f"a{{{rng.integers(1, 90)}}}")] * 4))
            states = list(pool.map(compiler.start, [grammar] * 8))
            masks = [found for _, found in pool.map(lambda state: state.allow([5, 0, 1], 1), states)]
            assert all(np.array_equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "grammar must be a regex that llguidance takes .*unclosed group"),
        (Grammar("lark", "start: nothing"), "grammar must be a lark that llguidance takes .*unknown name"),
        (Grammar("json_schema", '{"type": "strin"}'), "grammar must be a json_schema that llguidance takes .*strin"),
        (Grammar("json_schema", "{bad"), "grammar must be a json_schema that llguidance takes"),
        (Grammar("json_schema", "3"), "grammar must be a json_schema that llguidance takes"),
    ],
)
def test_wrong_grammar_is_refused_by_llguidances_message(tokenizer, grammar, message):
    # In this way of stepping other tests have compiled the programs already.
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING["async_drafts"]), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        engine.add_request([1], SamplingParams(max_tokens=9, grammar=grammar))
    assert not engine.has_unfinished
    assert len(engine.generate([1], params_of("[ab]{3,9}"))[0].token_ids) >= 3


def test_what_a_grammar_needs_is_named(tokenizer):
    params = params_of("a")
    with pytest.raises(
        ValueError, match=r"grammar must be None in an engine without the tokenizer of a tokenizer\.json"
    ):
        Engine(MODEL, EngineConfig(**SIZES)).add_request([1], params)
    with pytest.raises(ValueError, match="grammar must be None for a model without an end token"):
        GrammarCompiler(tokenizer, VOCAB, ()).check(params.grammar)
    with pytest.raises(ValueError, match="ignore_eos must be False if there is a grammar"):
        dataclasses.replace(params, ignore_eos=True)
    with pytest.raises(ValueError, match="min_tokens must be 0 if there is a grammar"):
        dataclasses.replace(params, min_tokens=1)
    with pytest.raises(ValueError, match="kind must be one of"):
        Grammar("json", "{}")
    with pytest.raises(ValueError, match="text must be empty"):
        Grammar("json_object", "{}")
    with pytest.raises(ValueError, match="text must be not empty"):
        Grammar("regex")


@pytest.mark.parametrize("stepping", ["plain", "async_drafts"])
def test_grammar_that_no_token_can_begin_disturbs_no_other_request(tokenizer, stepping):
    engine = Engine(MODEL, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)
    first = engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    # No token has a capital letter.
    wrong, third = engine.add_request([1, 2], params_of("Z+")), engine.add_request([3], SamplingParams(max_tokens=4))
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert (outputs[wrong].finish_reason, type(outputs[wrong].error)) == ("error", GrammarError)
    assert (outputs[first].finish_reason, outputs[third].finish_reason) == ("length", "length")
    assert (engine.stats.preemptions, engine.stats.prefill_tokens) == (0, 5 + 1)
    assert (engine.cache.states.pool.num_held, engine.cache.kv.pool.num_held) == (0, 0)
