"""Tests of the server's page in a browser without a window: what it sends, shows and never does."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from fakes.http import Served

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.serve.settings import Settings

CHROMIUM = Path("/usr/bin/chromium")
# It runs as root in containers, and calls no one but the server.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
ARGUMENTS += ("--disable-component-update", "--disable-sync")
ANSWERED = ".turn.assistant:last-child:not(.busy)"


@pytest.fixture(scope="module")
def browser(request):
    missing = [name for name, there in {
        "the Python package playwright": importlib.util.find_spec("playwright"),
        str(CHROMIUM): CHROMIUM.exists(),
    }.items() if not there]  # fmt: skip
    if missing:
        reason = f"the page is tested in a browser, which needs {' and '.join(missing)}"
        pytest.fail(reason) if request.config.getoption("browser") == "required" else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served(engine):
    with Served(engine, Settings(model_name="bytes", warmup="none"), load_chat_template(BYTE_MODEL)) as served:
        yield served


class Page:
    """The page in a tab of its own. `calls` are the addresses that it has called, `faults` are errors of its script."""

    def __init__(self, browser, served, **options):
        self.calls, self.faults = [], []
        self.tab = browser.new_page(viewport=dict(width=1200, height=800), **options)
        self.tab.set_default_timeout(300_000)  # ms
        self.tab.on("request", lambda request: self.calls.append(request.url))
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.goto(f"http://127.0.0.1:{served.port}/")
        self.tab.wait_for_selector("#state.ready")

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        self.tab.close()
        assert kind or not self.faults, self.faults

    def set(self, **fields):
        """Opens the settings and fills fields."""
        self.tab.click("summary")
        for name, value in fields.items():
            self.tab.fill(f"#{name}", str(value))

    def say(self, text, until=ANSWERED):
        self.tab.fill("#message", text)
        self.tab.press("#message", "Enter")
        self.tab.wait_for_selector(until)

    def text(self, selector):
        return self.tab.text_content(selector)

    def count(self, selector):
        return self.tab.locator(selector).count()


def test_a_chat_shows_the_answer_and_what_came_from_the_cache(served, browser):
    system, question = "Answer as a manual of Python does. " * 3, "What is a list?"
    with Page(browser, served) as page:
        page.set(temperature=0, limit=20, system=system)
        assert page.text("#model") == "bytes"
        page.say(question)
        messages = [dict(role="system", content=system.strip()), dict(role="user", content=question)]
        body = dict(messages=messages, max_tokens=20, temperature=0)
        first = served.post("/v1/chat/completions", body).json()
        (note,) = page.tab.locator(".turn.assistant .note").all_text_contents()
        assert page.text(".turn.assistant") == first["choices"][0]["message"]["content"] + note
        assert re.fullmatch(r"\d+ tokens; first token after \d+ ms, \d+ tokens/s", note)
        # The second prompt has the first one and its answer, and more.
        page.say("And a tuple?")
        answers = [text.removesuffix(note) for text, note in zip(
            page.tab.locator(".turn.assistant").all_text_contents(),
            page.tab.locator(".turn.assistant .note").all_text_contents(),
            strict=True,
        )]  # fmt: skip
        messages += [dict(role="assistant", content=answers[0]), dict(role="user", content="And a tuple?")]
        view = served.post("/cache", dict(messages=messages)).json()
        hit, total = map(int, page.text("#numbers b").split(" / "))
        assert total == view["num_tokens"]
        assert hit >= 64
        assert hit % view["block_size"] == 0
        assert page.count("#blocks .hit") == hit // view["kv_page_size"]
        assert page.count("#blocks .generated") >= 1
        messages += [dict(role="assistant", content=answers[1])]
        after = served.post("/cache", dict(messages=messages, add_generation_prompt=False)).json()
        assert page.count("#blocks .kept") == len(after["boundaries"]) > 0
        assert page.tab.get_attribute("#blocks", "aria-label").startswith(f"{hit} of {total} prompt tokens")
        assert page.text("#why") in (
            "No earlier prompt went on with the same tokens, so the rest had to be computed.",
            "All of the prompt that can be cached came from the cache.",
        )
        assert f"{after['state_blocks']['kept']} kept, of {after['state_blocks']['total']}" in page.text("#pools")
        assert all(url.startswith(f"http://127.0.0.1:{served.port}/") for url in page.calls if url[:5] != "data:")
    served.wait_until_idle()


def test_text_is_never_html(served, browser):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    chunk = dict(choices=[dict(index=0, delta=dict(content=evil), token_ids=[1])])
    usage = dict(choices=[], usage=dict(prompt_tokens=9, completion_tokens=1, cache_miss=evil))
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in (chunk, usage)) + "data: [DONE]\n\n"
    with Page(browser, served) as page:
        page.tab.on("dialog", lambda dialog: page.faults.append(dialog.message))
        page.tab.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream))
        page.say(evil)
        assert page.count("img") == 0
        assert page.count("script") == 1
        assert page.text(".turn.user") == evil
        assert page.text(".turn.assistant").startswith(evil)
        assert page.text("#why") == evil


def test_reasoning_is_shown_apart_and_not_said_again(served, browser):
    """It is text, too, and stands above the answer."""
    deltas = [dict(role="assistant", content=""), dict(reasoning_content="<b>Hm", reasoning="<b>Hm"),
              dict(reasoning_content=".</b>"), dict(content="Yes"), dict(content=".")]  # fmt: skip
    chunks = [dict(choices=[dict(index=0, delta=delta, token_ids=[1])]) for delta in deltas]
    chunks.append(dict(choices=[], usage=dict(prompt_tokens=9, completion_tokens=4, cache_miss=None)))
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in chunks) + "data: [DONE]\n\n"
    asked = []
    with Page(browser, served) as page:
        answer = lambda route: (asked.append(route.request.post_data_json), route.fulfill(body=stream))
        page.tab.route("**/v1/chat/completions", answer)
        page.say("Well?")
        assert page.text(".thought") == "<b>Hm.</b>"
        assert page.text(".turn.assistant").startswith("<b>Hm.</b>Yes.")
        page.say("So?")
    assert [one["content"] for one in asked[1]["messages"]][1:] == ["Well?", "Yes.", "So?"]


def test_the_page_may_run_and_call_nothing_foreign(served, browser):
    answer = served.client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy
    # Nothing in the file leads elsewhere, but for the name of a namespace.
    assert set(re.findall(r"https?://[^'\"\s]+", answer.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)
    with Page(browser, served) as page:
        page.faults.clear()
        page.tab.evaluate("() => { const own = document.createElement('script'); own.textContent = 'window.ran = 1';"
                          " document.body.append(own); }")  # fmt: skip
        assert page.tab.evaluate("() => window.ran") is None


def test_stop_aborts_the_request_and_keeps_what_was_said(served, browser):
    with Page(browser, served) as page:
        page.set(temperature=1, limit=300)
        aborted = served.engine.stats.aborted_requests
        page.say("Count to a million.", until="#speed:not(:empty)")
        page.tab.click("#stop")
        page.tab.wait_for_selector(ANSWERED)
        assert page.text(".turn.assistant .note") in ("stopped", *page.tab.locator(".note").all_text_contents())
        assert page.text("#alert") == ""
        assert page.tab.is_enabled("#send")
        served.wait_until_idle()
        assert served.engine.stats.aborted_requests == aborted + (page.text(".turn.assistant .note") == "stopped")
        page.tab.click("#fresh")
        assert page.count(".turn") == 0


def test_a_refused_question_comes_back_with_the_reason(served, browser):
    with Page(browser, served) as page:
        page.set(limit=10**6)
        page.say("A question", until="#alert:not(:empty)")
        assert "must fit in" in page.text("#alert")
        assert page.tab.input_value("#message") == "A question"
        assert page.count(".turn") == 0
        page.tab.fill("#limit", "4")
        page.say("A question")
        assert page.text("#alert") == ""


def test_the_page_asks_with_the_key_that_it_is_given(engine, browser):
    settings = Settings(model_name="bytes", api_keys=("sk-first",), warmup="none")
    with Served(engine, settings, load_chat_template(BYTE_MODEL)) as locked, Page(browser, locked) as page:
        page.say("A question", until="#alert:not(:empty)")
        assert "authorization" in page.text("#alert")
        page.set(key="sk-first", limit=4)
        page.say("A question")
        assert page.count(".turn.assistant") == 1


def test_the_page_is_light_or_dark_as_its_reader_wants(served, browser):
    colors = []
    for scheme in ("light", "dark"):
        with Page(browser, served, color_scheme=scheme) as page:
            colors.append(page.tab.evaluate("() => getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
    assert dark < 120 < 600 < light
