"""Stop strings end a request at the token that completes one, under every way of stepping; a tokenizer may fail."""

import copy

import pytest
from fakes.letters import Letters
from fakes.raising import raising
from fakes.speller import VOCAB, next_token
from fakes.spelling_engine import DRAFTS, SIZES, SPELLER, assert_nothing_is_held, drain, joined, prompts

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.engine.device.runner import StepRunner

pytestmark = pytest.mark.usefixtures("one_program")
STEPPING = {
    "sync": {},
    "drafts": dict(DRAFTS, checked=True),
    "async": dict(DRAFTS, async_stepping=True),
    "roomy": dict(num_state_blocks=60, num_kv_pages=90),
}
LENGTH = 18
LETTERS = Letters()


def answer(prompt):
    """The tokens that the speller generates."""
    tokens = list(prompt)
    for _ in range(LENGTH):
        tokens.append(next_token(tokens, SPELLER.stutter, SPELLER.adds))
    return tokens[len(prompt) :]


def params(*stop, **fields):
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, stop=stop, **fields)


def make_engine(stepping, tokenizer=LETTERS):
    return Engine(SPELLER, EngineConfig(**SIZES | STEPPING[stepping]), tokenizer=tokenizer)


def assert_stopped(output, prompt, *stop):
    """Checks an output against the answer, searched token by token."""
    tokens = answer(prompt)
    for number in range(1, LENGTH + 1):
        text = LETTERS.decode(tokens[:number])
        found = [(text.find(one) + len(one), place) for place, one in enumerate(stop) if one in text]
        if found:
            end, place = min(found)
            expected = (tuple(tokens[:number]), text[: end - len(stop[place])], "stop", stop[place])
            break
    else:
        expected = (tuple(tokens), LETTERS.decode(tokens), "length", None)
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == expected


@pytest.mark.parametrize("is_streamed", [False, True], ids=["step", "step_outputs"])
@pytest.mark.parametrize("stepping", STEPPING)
def test_request_ends_at_the_token_that_completes_a_stop_string(rng, stepping, is_streamed):
    engine, asked = make_engine(stepping), prompts(rng)
    stops = []
    for number, prompt in enumerate(asked):
        text = LETTERS.decode(answer(prompt))
        # In the middle, two at once of which one is in the other, at the first token, and one that never comes.
        stops.append([(text[9:12],), (text[6:9], text[7:9]), (text[0], text[3:5]), ("never", text[16:])][number % 4])
    ids = [engine.add_request(prompt, params(*stop)) for prompt, stop in zip(asked, stops, strict=True)]
    if is_streamed:
        whole = joined(drain(engine))
        outputs = {name: update.output for name, update in whole.items()}
        assert [whole[name].text for name in ids] == [outputs[name].text for name in ids]
    else:
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
    for name, prompt, stop in zip(ids, asked, stops, strict=True):
        assert_stopped(outputs[name], prompt, *stop)
    assert_nothing_is_held_in(engine)


def assert_nothing_is_held_in(engine):
    if engine.config.num_state_blocks == SIZES["num_state_blocks"]:
        assert_nothing_is_held(engine)
    assert not engine.core.requests


def test_text_that_may_become_a_stop_string_is_not_shown(rng):
    engine = make_engine("sync")
    answers = [(prompt, LETTERS.decode(answer(prompt))) for prompt in prompts(rng)]
    # The first two letters come, and then another one than the stop string has, which doesn't begin it either.
    prompt, text = next((prompt, text) for prompt, text in answers if text[4] != text[2])
    stop = text[2:4] + "\n"
    engine.add_request(prompt, params(stop))
    updates, shown, number = drain(engine), {}, 0
    for update in updates:
        number += len(update.token_ids)
        shown[number] = shown.get(number - len(update.token_ids), "") + update.text
    assert (shown[4], shown[5], shown[LENGTH]) == (text[:2], text[:5], text)


def test_prompt_is_no_part_of_the_text(rng):
    engine, candidates = make_engine("sync"), ([*prompt, token] for prompt in prompts(rng) for token in range(61))
    # Its last token is not in its answer.
    prompt = next(prompt for prompt in candidates if prompt[-1] not in answer(prompt))
    (output,) = engine.generate(prompt, params(LETTERS.decode([prompt[-1], *answer(prompt)[:1]])))
    assert output.finish_reason == "length"


@pytest.mark.parametrize("stepping", ["sync", "async"])
def test_stop_string_within_min_tokens_ends_nothing(rng, stepping):
    engine, prompt = make_engine(stepping), prompts(rng)[0]
    tokens = answer(prompt)
    text = LETTERS.decode(tokens)
    # The last letter comes first as token `number`, and again as the last.
    number = next(n for n in range(3, LENGTH) if text[n] in text[n + 1 :])
    last = text.index(text[number], number + 1)
    (output,) = engine.generate(prompt, params(text[number], min_tokens=number + 1))
    assert (output.token_ids, output.text) == (tuple(tokens[: last + 1]), text[:last])
    (output,) = engine.generate(prompt, params(text[number], min_tokens=number))
    assert (output.token_ids, output.text) == (tuple(tokens[: number + 1]), text[:number])


@pytest.mark.parametrize("tokenizer", [LETTERS, None])
@pytest.mark.parametrize("several", [False, True])
def test_an_end_token_is_no_stop_token_unless_it_is_ignored(rng, several, tokenizer):
    """As in vLLM, which looks for the model's end tokens first."""
    model, prompt = copy.copy(SPELLER), prompts(rng)[0]
    tokens = answer(prompt)
    end, other = tokens[5], next(token for token in range(VOCAB) if token not in tokens)
    model.config = model.config._replace(eos_token_id=(other, end) if several else end)
    engine = Engine(model, EngineConfig(**SIZES | STEPPING["drafts"]), tokenizer=tokenizer)
    for stop, ignore_eos, reason in (((), False, None), ((end,), False, None), ((end,), True, end)):
        wanted = SamplingParams(max_tokens=LENGTH, stop_token_ids=stop, ignore_eos=ignore_eos)
        (output,) = engine.generate(prompt, wanted)
        assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", reason, end)


def test_stop_tokens_and_lengths_have_their_reasons(rng):
    engine, prompt = make_engine("drafts"), prompts(rng)[0]
    token = answer(prompt)[5]
    for fields in ({}, {"stop": "\n"}):
        (output,) = engine.generate(prompt, SamplingParams(max_tokens=LENGTH, stop_token_ids=(token,), **fields))
        assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", token, token)
        assert output.text == LETTERS.decode(output.token_ids[:-1])
    name = engine.add_request(prompt, params("\n"))
    engine.step()
    output = engine.abort(name)
    assert (output.finish_reason, output.stop_reason) == ("abort", None)
    assert output.text == LETTERS.decode(output.token_ids)


@pytest.mark.parametrize("stepping", STEPPING)
def test_stop_token_is_one_of_the_tokens_and_not_in_the_text(rng, stepping):
    """As in vLLM: it ends no stop string either."""
    engine, asked = make_engine(stepping), prompts(rng)
    numbers = {}
    for number, prompt in enumerate(asked):
        token, place = answer(prompt)[number % 4 + 2], number % 4 + 1
        stop = ("\n", LETTERS.decode(answer(prompt)[place : place + 2]))[number % 2]
        name = engine.add_request(prompt, SamplingParams(max_tokens=LENGTH, stop_token_ids=(token,), stop=stop))
        numbers[name] = prompt, answer(prompt).index(token)
    for name, update in joined(drain(engine)).items():
        prompt, number = numbers[name]
        assert update.token_ids == update.output.token_ids == tuple(answer(prompt)[: number + 1])
        assert update.text == update.output.text == LETTERS.decode(answer(prompt)[:number])
        assert (update.output.finish_reason, update.output.stop_reason) == ("stop", answer(prompt)[number])


@pytest.mark.parametrize("place", [(StepRunner, "read"), (HybridCache, "commit"), (StepRunner, "dispatch")], ids=str)
@pytest.mark.parametrize("stepping", ["drafts", "async"])
def test_text_follows_from_the_tokens_after_a_failure(rng, stepping, place):
    """A step that fails ends some requests. The others go on with the text that they had."""
    asked = prompts(rng)
    for turn in range(2, 14, 4):
        engine = make_engine(stepping)
        stops = [LETTERS.decode(answer(prompt))[9:12] for prompt in asked]
        ids = [engine.add_request(prompt, params(stop)) for prompt, stop in zip(asked, stops, strict=True)]
        with raising(*place, turn):
            whole = joined(drain(engine))
        for name, prompt, stop in zip(ids, asked, stops, strict=True):
            output = whole[name].output
            assert whole[name].text == output.text
            if output.error is None:
                assert_stopped(output, prompt, stop)
        assert any(whole[name].output.error is None for name in ids)
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["step", "step_outputs"])
@pytest.mark.parametrize("stop", [(), ("\n",)], ids=["text at the end", "stop string"])
def test_tokenizer_that_raises_ends_only_its_request(rng, is_streamed, stop):
    asked = [prompt for prompt in prompts(rng) if len(set(answer(prompt))) > 6]
    # A token of the second answer that no other answer has.
    others = {token for number, prompt in enumerate(asked) if number != 1 for token in answer(prompt)}
    broken = next(token for token in answer(asked[1])[3:] if token not in others)
    engine = make_engine("drafts", Letters({broken}))
    ids = [engine.add_request(prompt, params(*stop)) for prompt in asked]
    if is_streamed:
        whole = joined(drain(engine))
        outputs = [whole[name].output for name in ids]
        assert all(whole[name].text == whole[name].output.text for name in ids)
    else:
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        outputs = [outputs[name] for name in ids]
    assert isinstance(outputs[1].error, LookupError)
    assert LETTERS.decode(answer(asked[1])).startswith(outputs[1].text)
    for number, (output, prompt) in enumerate(zip(outputs, asked, strict=True)):
        if number != 1:
            assert_stopped(output, prompt, *stop)
    assert_nothing_is_held(engine)
    with pytest.raises(LookupError):
        engine.generate(asked[1], params(*stop))
    name = engine.add_request(asked[1], params(*stop))
    for _ in range(20):
        if not engine.core.requests:
            break
        engine.step()
    assert engine.abort(name) is None
    assert_nothing_is_held(engine)


def test_abort_needs_no_tokenizer(rng):
    engine = make_engine("sync", Letters(range(61)))
    name = engine.add_request(prompts(rng)[0], params())
    for _ in range(4):
        engine.step()
    output = engine.abort(name)
    assert (output.finish_reason, output.text, len(output.token_ids) > 0) == ("abort", "", True)
    assert_nothing_is_held(engine)


def test_tokenizer_that_raises_while_the_engine_recovers_ends_its_request(rng, monkeypatch):
    """The interrupt comes after the text of a token was read and before the request has the token."""
    tokenizer = Letters()
    engine, prompt = make_engine("sync", tokenizer), prompts(rng)[0]
    name = engine.add_request(prompt, params("\n"))
    for _ in range(4):
        engine.step()

    def interrupt(*result):
        tokenizer.broken = frozenset(range(61))
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "finished", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == (name, "error")
    assert isinstance(output.error, LookupError)
    assert_nothing_is_held(engine)


class Unfinished(Letters):
    """Each letter is followed by the beginning of a character, so no text is settled before the end."""

    def decode(self, token_ids, **options):
        return "".join(super(Unfinished, self).decode([token]) + "\ufffd" for token in token_ids)


def test_stop_string_before_an_unfinished_character_is_found_at_the_end(rng):
    engine, prompt = make_engine("sync", Unfinished()), prompts(rng)[0]
    letters = LETTERS.decode(answer(prompt)[:10])
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=10, ignore_eos=True, stop=letters[3]))
    assert (output.finish_reason, output.stop_reason, len(output.token_ids)) == ("stop", letters[3], 10)
    assert output.text == Unfinished().decode(answer(prompt)[: letters.index(letters[3])])
