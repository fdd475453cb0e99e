"""The page at /, in a real headless Chromium."""

import json
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from services.gateway import keys
from tests.e2e.stack import Stack
from tests.tiny import tiny_tokenizer, weightless_model

ANSWER = "Paris. The model had two layers and four heads, and it was happy with what it had."
SLOW_SEED, STEP_S = 7, 0.02
MAX_LENGTH = 8192  # an answer that fills it takes minutes: whatever is waited for while it comes happens in time
WITHIN_MS = 60_000
REFUSED = re.compile("status of 40[01]")  # what the browser says of answers that tests provoke


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weightless_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=MAX_LENGTH)


@pytest.fixture(scope="module")
def browser(debian: Callable[..., None]) -> Iterator[Browser]:
    debian("chromium")
    path = shutil.which("chromium")
    assert path is not None
    expect.set_options(timeout=WITHIN_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=WITHIN_MS)  # tests may run as root
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model: Path, key_file: Path) -> Iterator[Stack]:
    """With a key, which the page must send."""
    answer = [*tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")).encode(ANSWER, add_special_tokens=False), 2]
    script = {"step_s": STEP_S, "by_seed": {SLOW_SEED: {"ids": [40, 41, 42], "repeat": True}, 1: {"ids": answer}}}
    keys.add(key_file, "other")
    with Stack(
        tmp_path_factory.mktemp("stack"),
        model=model,
        served_model_names=("tiny", "org/tiny"),
        engine="scripted",
        script=script,
        gateway_args=["--api-keys", str(key_file)],
    ) as running:
        yield running


@pytest.fixture
def page(browser: Browser, stack: Stack, key_file: Path) -> Iterator[Page]:
    """The page with a key typed in and a seed chosen. Nothing that the browser complains about may happen."""
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not REFUSED.search(message.text):
            complaints.append(message.text)

    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WITHIN_MS)
    page.on("console", note)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(stack.url)
    expect(page.locator("#status-error")).to_contain_text("API key")
    page.get_by_label("API key").fill(keys.add(key_file, f"page-{uuid.uuid4().hex}"))
    expect(page.locator("#health")).to_have_text("ready")
    page.get_by_label("Seed").fill("1")
    yield page
    context.close()
    assert not complaints
    assert all(url.startswith(stack.url) for url in asked), "nothing comes from elsewhere"


def test_a_chat_is_streamed_with_its_figures(page: Page) -> None:
    page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    page.keyboard.press("Enter")
    expect(page.locator("#messages li.assistant")).to_have_text(ANSWER)
    expect(page.locator("#figures")).to_have_text(re.compile(r"first token \d+\.\d\d s · [\d.]+ tokens/s · \d+ \+ \d+ tokens"))
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.get_by_label("Stream").uncheck()
    page.get_by_label("Message", exact=True).fill("And again?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#messages li.assistant")).to_have_text([ANSWER, ANSWER])
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#messages li")).to_have_count(0)


def test_an_answer_can_be_stopped_and_the_status_shows_it(page: Page, stack: Stack) -> None:
    page.get_by_label("Seed").fill(str(SLOW_SEED))
    page.get_by_label("Message", exact=True).fill("hi")
    page.keyboard.press("Enter")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#rate")).to_have_text(re.compile(r"[1-9]\d*"))
    expect(page.locator("#groups tr")).to_have_count(1)
    expect(page.locator("#groups tr td").nth(1)).to_have_text("ready")
    page.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.get_by_role("button", name="Stop")).to_be_disabled()
    expect(page.locator("#messages li.error")).to_have_count(0)


def test_a_new_chat_knows_nothing_of_an_answer_that_it_has_cut(page: Page) -> None:
    page.get_by_label("Seed").fill(str(SLOW_SEED))
    page.get_by_label("Message", exact=True).fill("hi")
    page.keyboard.press("Enter")
    expect(page.locator("#messages li.assistant")).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    page.get_by_label("Seed").fill("1")
    page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    with page.expect_request("**/v1/chat/completions") as request:
        page.keyboard.press("Enter")
    body = json.loads(request.value.post_data or "")
    assert [message["role"] for message in body["messages"]] == ["user"]
    expect(page.locator("#messages li.assistant")).to_have_text(ANSWER)


def test_errors_are_shown_as_they_are_told(page: Page) -> None:
    page.get_by_label("Max tokens").fill("100000")
    page.get_by_label("Message", exact=True).fill("hi")
    with page.expect_response("**/v1/chat/completions") as response:
        page.keyboard.press("Enter")
    assert response.value.status == 400
    expect(page.locator("#messages li.error")).to_contain_text("context")


def test_all_can_be_done_with_the_keyboard(page: Page) -> None:
    page.locator("body").focus()
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    assert {
        "key",
        "theme",
        "clear",
        "messages",
        "prompt",
        "send",
        "model",
        "system",
        "temperature",
        "top_p",
        "max_tokens",
        "seed",
        "stream",
    } <= {*seen}
    assert page.locator("input:not([id]), select:not([id])").count() == 0
    unnamed = "els => els.filter(e => !e.labels?.length && !e.getAttribute('aria-label') && !e.textContent.trim()).length"
    assert page.locator("input, select, textarea, button").evaluate_all(unnamed) == 0
    assert page.get_by_label("Model").locator("option").all_text_contents() == ["tiny", "org/tiny"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_legible(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    contrast = """() => {
        const light = (color) => {
            const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const pairs = [["h1", "header"], ["h2", ".card"], ["#send", "#send"], ["td", ".card"], [".parameters label", ".card"]];
        return pairs.map(([text, ground]) => {
            const one = light(getComputedStyle(document.querySelector(text)).color);
            const two = light(getComputedStyle(document.querySelector(ground)).backgroundColor);
            return (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
        });
    }"""
    expect(page.locator("#groups td").first).to_be_visible()
    assert min(page.evaluate(contrast)) >= 4.5
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Change between light and dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_it_fits_a_small_screen(page: Page) -> None:
    page.set_viewport_size({"width": 380, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
