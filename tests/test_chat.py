"""A conversation on a terminal: text comes in pieces, later turns hit the cache and say so, and an answer may be cut off."""

import io

import pytest
from fakes.letters import Letters
from fakes.speller import next_token
from fakes.spelling_engine import SIZES, SPELLER

pytest.importorskip("jinja2")

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cli import commands as cli
from mamba_align_jax.cli.chat import HELP, Conversation, stream, talk
from mamba_align_jax.engine.text.chat_template import ChatTemplate

pytestmark = pytest.mark.usefixtures("one_program")
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
FIRST, SECOND = "ABCDEFGHIJKLMNOPQRSTUV", "XYZ"
LETTERS = Letters()


@pytest.fixture
def engine():
    return Engine(SPELLER, EngineConfig(**SIZES), tokenizer=LETTERS)


@pytest.fixture(scope="module")
def template():
    return ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")


def continuation(text, length):
    tokens = LETTERS.encode(text)
    for _ in range(length):
        tokens.append(next_token(tokens, SPELLER.stutter, SPELLER.adds))
    return LETTERS.decode(tokens[-length:])


def test_stream_yields_text_as_it_comes(engine):
    pieces = [update.text for update in stream(engine, LETTERS.encode(FIRST), PARAMS)]
    assert len(pieces) >= 10
    assert "".join(pieces) == continuation(FIRST, 10)
    leaving = stream(engine, LETTERS.encode(FIRST), PARAMS)
    next(leaving)
    leaving.close()
    assert not engine.has_unfinished


def test_stream_raises_what_ended_the_request(engine, monkeypatch):
    monkeypatch.setattr(engine.runner, "dispatch", lambda plan: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(stream(engine, [1, 2], PARAMS))


def test_later_turn_comes_from_the_cache_and_says_so(engine, template):
    conversation = Conversation(engine, LETTERS, template, PARAMS)
    answer = "".join(conversation.say(FIRST))
    assert answer == continuation(FIRST, 10)
    assert conversation.cached.startswith("0 of 22 prompt tokens came from the cache; first token after ")
    assert "".join(conversation.say(SECOND)) == continuation(FIRST + answer + SECOND, 10)
    cached = conversation.output.num_cached_tokens
    assert 16 <= cached < 35
    assert conversation.cached.startswith(
        f"{cached} of 35 prompt tokens came from the cache ({cached / 35:.0%}); first"
    )
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2


def test_answers_end_where_the_model_has_no_more_room(engine, template):
    conversation = Conversation(engine, LETTERS, template, PARAMS, system=FIRST + FIRST)
    assert conversation.messages == [{"role": "system", "content": FIRST + FIRST}]
    assert len("".join(conversation.say(FIRST[:15]))) == 64 - 44 - 15
    with pytest.raises(ValueError, match="has 65 tokens, and the model reads 64"):
        list(conversation.say("A"))


def test_answers_end_where_the_pool_of_pages_has_no_more_room(template):
    engine = Engine(SPELLER, EngineConfig(**SIZES | dict(num_kv_pages=12)), tokenizer=LETTERS)
    conversation = Conversation(engine, LETTERS, template, PARAMS)
    assert "".join(conversation.say(FIRST + FIRST[:18])) == continuation(FIRST + FIRST[:18], 4)
    with pytest.raises(ValueError, match="has 45 tokens, and the model reads 44"):
        list(conversation.say("A"))


@pytest.mark.parametrize("said", ["A" * 80, "", "~"], ids=["long", "empty", "unknown"])
def test_a_refused_turn_was_never_said(engine, template, said):
    """The engine refuses what has no tokens, and tokens that the model does not have."""
    conversation = Conversation(engine, LETTERS, template, PARAMS)
    with pytest.raises(ValueError, match="token"):
        list(conversation.say(said))
    assert conversation.messages == []
    assert "".join(conversation.say(FIRST)) == continuation(FIRST, 10)
    assert len(conversation.messages) == 2


def converse(conversation, *said, write=None):
    """Says things, and returns what is written and noted."""
    written, notes, said = [], [], list(said)

    def ask():
        if not said:
            raise EOFError
        return said.pop(0)

    talk(conversation, ask, write or written.append, notes.append)
    return "".join(written), notes


def test_user_talks_until_the_input_ends(engine, template):
    begin = lambda: Conversation(engine, LETTERS, template, PARAMS)
    answer = continuation(FIRST, 10)
    written, notes = converse(begin, FIRST, "  ", "/help", "/new", FIRST, "/exit", "never said")
    assert written == f"{answer}\n{answer}\n"
    assert (notes[0], notes[2]) == (HELP, HELP)
    assert [note.split(" ")[0] for note in (notes[1], notes[3])] == ["0", "16"]
    assert len(notes) == 4
    _, notes = converse(begin, "A" * 80)
    assert "the conversation has 80 tokens" in notes[-1]


def test_interrupt_ends_an_answer_and_not_the_conversation(engine, template):
    written, conversation = [], Conversation(engine, LETTERS, template, PARAMS)

    def write(text):
        written.append(text)
        if len("".join(written)) == 3:
            raise KeyboardInterrupt

    _, notes = converse(lambda: conversation, FIRST, SECOND, write=write)
    assert notes[1] == "The answer was interrupted."
    assert conversation.messages[1]["content"] == continuation(FIRST, 10)[:3]
    assert notes[2].split(" ")[2] == str(22 + 3 + 3)
    assert not engine.has_unfinished


def test_interrupt_before_the_first_word_says_nothing_of_the_turn_before(engine, template, monkeypatch):
    conversation, interrupts = Conversation(engine, LETTERS, template, PARAMS), []

    def interrupt():
        interrupts.append(KeyboardInterrupt())
        raise interrupts[-1]

    def write(text):
        if text == "\n":
            monkeypatch.setattr(engine, "step_outputs", interrupt)

    _, notes = converse(lambda: conversation, FIRST, SECOND, write=write)
    assert len(interrupts) == 1
    assert notes[1].startswith("0 of 22 prompt tokens came from the cache")
    assert notes[2] == "The answer was interrupted."


def test_command_line_talks(engine, template, monkeypatch, capsys, tmp_path):
    said = [FIRST, "/exit"]
    monkeypatch.setattr(Engine, "from_pretrained", lambda *arguments, **options: engine)
    monkeypatch.setattr("mamba_align_jax.engine.text.chat_template.load_chat_template", lambda path: template)
    monkeypatch.setattr(cli._CONSOLE, "input", lambda prompt: said.pop(0))
    options = ["--model", str(tmp_path), "--max-tokens", "10", "--stop", "\n"]
    assert cli.main(["chat", *options]) == 0
    assert f"\n{continuation(FIRST, 10)}\n" in capsys.readouterr().out
    monkeypatch.setattr("mamba_align_jax.engine.text.chat_template.load_chat_template", lambda path: None)
    assert cli.main(["chat", *options]) == 2
    assert "--model must have tokenizer.json and a chat template" in capsys.readouterr().err


def test_generate_writes_texts_that_continue_standard_input(engine, monkeypatch, capsys, tmp_path):
    asked = []
    add_request = engine.add_request
    monkeypatch.setattr(engine, "add_request", lambda *request: asked.append(request[1]) or add_request(*request))
    monkeypatch.setattr(Engine, "from_pretrained", lambda *arguments, **options: engine)
    monkeypatch.setattr("sys.stdin", io.StringIO(FIRST + "\n"))
    sampling = ["--max-tokens", "10", "--top-p", "0.5", "--top-k", "3", "--stop", "?", "--stop", "!", "--seed", "5"]
    assert cli.main(["generate", str(tmp_path), "--n", "2", *sampling]) == 0
    text = FIRST + continuation(FIRST, 10)
    assert capsys.readouterr().out == f"--- 1 of 2\n{text}\n--- 2 of 2\n{text}\n"
    fields = dict(max_tokens=10, top_p=0.5, top_k=3, stop=("?", "!"))
    assert asked == [SamplingParams(**fields, seed=5), SamplingParams(**fields, seed=6)]


def test_a_prompt_follows_the_model_or_has_a_name(engine, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Engine, "from_pretrained", lambda *arguments, **options: engine)
    for arguments in ([str(tmp_path), FIRST], ["--prompt", FIRST]):
        assert cli.main(["generate", *arguments, "--max-tokens", "10"]) == 0
        assert capsys.readouterr().out == f"{FIRST}{continuation(FIRST, 10)}\n"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert cli.main(["generate", str(tmp_path)]) == 2
    assert "prompt must be given after the model, as --prompt or on standard input" in capsys.readouterr().err
