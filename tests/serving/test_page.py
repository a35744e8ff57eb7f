"""The page at /: one file that needs nothing else, and what somebody sees who uses it.

The tests in a browser need Chromium, as Debian's package `chromium` has it:

    python -m pytest -n0 -m servers tests/serving/test_page.py
"""

import html.parser
import itertools
import os
import re
import subprocess
import sys

import httpx2
import pytest

from clover_jax.serving.app import PAGE
from clover_jax.serving.options import KEY_VARIABLE
from tests.conftest import REPOSITORY
from tests.serving.asking import ask_app
from tests.serving.browser import CHROMIUM, Browser

SOURCE = PAGE.read_text(encoding="utf-8")
KEY = "a-key-of-the-tests"
REPEATED = "def close(self):\n    self.file.close()\n\n\n" * 3
CTRL = 2


def test_the_page_needs_nothing_but_itself():
    tags = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.feed(SOURCE)

    loaded = [a[name] for _, a in tags for name in ("src", "href", "action") if name in a]
    assert loaded == ["data:,"]  # the icon, which browsers would ask for otherwise
    assert not re.search(r"https?:|@import|url\(|import\(|\bimport\b.*from", SOURCE)
    # All that it asks for is the API of its own server.
    asked = {f"v1/{path}" for path in ("models", "completions", "chat/completions")}
    assert set(re.findall(r"\"(v1/[a-z/]*)\"", SOURCE)) == asked


def test_text_cannot_become_markup_a_key_is_not_stored_and_every_field_has_a_label():
    forbidden = "innerHTML|outerHTML|insertAdjacent|document.write|eval|DOMParser|Function"
    assert not re.search(rf"{forbidden}|[a-z]+Storage|indexedDB|cookie\b\s*=", SOURCE)
    fields = re.findall(r"<(?:input|textarea)[^>]* id=\"([^\"]+)\"", SOURCE)
    assert len(fields) == 11
    assert set(fields) == set(re.findall(r"<label for=\"([^\"]+)\"", SOURCE))


def luminance(color):
    """Return the relative luminance of WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", (0, 1), ids=("light", "dark"))
def test_text_stands_out_from_what_it_stands_on(scheme):
    root = re.findall(r":root \{([^}]*)\}", SOURCE)[scheme]
    colors = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", root))
    on = {
        "text": ("back", "panel", "even", "odd", "copied-even", "copied-odd"),
        "quiet": ("back", "panel"),
        "accent": ("back",),
        "on-accent": ("accent",),
        "wrong": ("wrong-back",),
    }
    for front, backs in on.items():
        for back in backs:
            assert contrast(colors[front], colors[back]) >= 4.5, (front, back)
    assert contrast(colors["line"], colors["panel"]) >= 3  # the border of a field


def test_the_page_is_there_before_the_model_and_without_a_key():
    answer = ask_app("GET", "/", api_key=(KEY,))
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    assert answer.text == SOURCE
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert ask_app("GET", "/", page=False).status_code == 404


@pytest.fixture(scope="module")
def url():
    """Return the address of a server that asks for a key."""
    command = (sys.executable, "-m", "clover_jax.serve", "--draft=lookup", "--port=0")
    environment = os.environ | {KEY_VARIABLE: KEY}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if address := re.search(r"on (http://\S+)", line):
                yield address[1]
                server.terminate()
                server.communicate(timeout=60)
                return
        pytest.fail("".join(lines))


@pytest.fixture
def tab(url, tmp_path):
    """Return a browser that shows the page, with the key given."""
    with Browser(tmp_path) as browser:
        browser.look(1280, 800, "light")
        browser.call("Page.navigate", url=url)
        browser.wait_for("document.querySelector('#error')?.textContent.includes('asks for a key')")
        assert browser.value("document.activeElement.id") == "key"
        browser.type("#key", "a-wrong-one")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#error').textContent.includes('not know this')")

        browser.type("#key", KEY)
        browser.type("#prompt", REPEATED)
        browser.wait_for("document.querySelector('#model').textContent.includes('builtin:tiny')")
        browser.wait_for("document.querySelector('#error').hidden")
        yield browser


def status(tab, words):
    return tab.wait_for(
        f"(s => s.includes({words!r}) && s)(document.querySelector('#status').textContent)"
    )


def figure(tab, name):
    return tab.value(f"document.querySelector('#{name}').textContent")


in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: install Debian's package chromium"
)


@pytest.mark.servers
@in_a_browser
def test_the_page_shows_what_each_forward_gave(tab, url):
    tab.type("#max-tokens", "120")
    tab.press("Enter", CTRL)
    said = status(tab, "Reached the limit of tokens")
    asked = {"prompt": REPEATED, "max_tokens": 120, "temperature": 0}
    key, path = {"Authorization": f"Bearer {KEY}"}, f"{url}/v1/completions"
    answer = httpx2.post(path, json=asked, headers=key, timeout=60).json()

    text = tab.value("document.querySelector('#text').textContent")
    assert text == answer["choices"][0]["text"]
    assert f"The prompt had {answer['usage']['prompt_tokens']} tokens." in said
    # Neighbors differ in shade, and some of them hold copies.
    stretches = tab.value("[...document.querySelectorAll('#text span')].map(s => s.className)")
    shades = [names.split()[0] for names in stretches]
    assert set(shades) == {"even", "odd"}
    assert all(one != other for one, other in itertools.pairwise(stretches))
    assert any("copied" in names for names in stretches)
    assert figure(tab, "tokens") == "120"
    assert int(figure(tab, "copied")) > 0
    forwards = int(re.search(r"in (\d+) forwards", said)[1])
    assert figure(tab, "tau") == f"{119 / forwards:.2f}"
    assert float(figure(tab, "rate")) > 0


@pytest.mark.servers
@in_a_browser
def test_the_page_shows_plain_decoding_beside(tab):
    tab.type("#max-tokens", "120")
    tab.type("#temperature", "1")
    tab.value("document.querySelector('#both').click()")
    tab.press("Enter", CTRL)
    said = tab.wait_for(
        "(s => s.includes('as fast') && s)(document.querySelector('#plain-status').textContent)"
    )
    assert "in 119 forwards and a prefill, τ 1.00" in said
    assert "The text is the same." in said
    assert float(figure(tab, "tau")) > 1
    assert figure(tab, "plain-tau") == "1.00"
    assert figure(tab, "text") == figure(tab, "plain-text")
    for width, scheme in ((1440, "light"), (1280, "dark"), (360, "light")):
        tab.look(width, 900, scheme)
        root = "document.documentElement"
        assert tab.value(f"{root}.scrollWidth <= {root}.clientWidth"), width

    tab.value("document.querySelector('#none').click()")
    tab.press("Enter", CTRL)
    status(tab, "τ 1.00")
    assert tab.value("document.querySelector('#plain-lane').hidden")


@pytest.mark.servers
@in_a_browser
def test_the_page_stops_chats_and_tells_errors(tab):
    tab.type("#max-tokens", "900")
    tab.type("#temperature", "1")
    tab.press("Enter", CTRL)
    tab.wait_for("Number(document.querySelector('#tokens').textContent) > 5")
    tab.press("Escape")
    status(tab, "Stopped: ")
    assert int(figure(tab, "tokens")) < 900
    assert tab.value("document.querySelector('#error').hidden")

    tab.value("document.querySelector('#chat').click()")
    tab.type("#max-tokens", "8")
    tab.press("Enter", CTRL)
    status(tab, "8 tokens")

    tab.type("#prompt", "x = 1\n" * 2000)
    tab.press("Enter", CTRL)
    tab.wait_for("document.querySelector('#error').textContent.includes('1024')")
    assert not tab.value("document.querySelector('#error').hidden")
    # A field that the browser finds wrong is not sent.
    sent = len([e for e in tab.events if e["method"] == "Network.requestWillBeSent"])
    tab.type("#max-tokens", "-3")
    tab.press("Enter", CTRL)
    assert len([e for e in tab.events if e["method"] == "Network.requestWillBeSent"]) == sent


@pytest.mark.servers
@in_a_browser
def test_the_page_fits_a_phone_works_by_keyboard_and_breaks_no_rule(tab, url):
    tab.type("#max-tokens", "60")
    tab.press("Enter", CTRL)
    status(tab, "Reached")
    for width, scheme in ((360, "light"), (360, "dark"), (800, "light"), (1280, "dark")):
        tab.look(width, 740, scheme)
        root = "document.documentElement"
        assert tab.value(f"{root}.scrollWidth <= {root}.clientWidth"), width
        back = tab.value("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(255, 255, 255)") == (scheme == "light")

    reached = []
    tab.value("document.querySelector('#key').focus()")
    for _ in range(8):
        tab.press("Tab")
        reached.append(tab.value("document.activeElement.id"))
        outline = tab.value("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", reached
    fields = ["completion", "drafted", "prompt", "temperature", "max-tokens", "seed"]
    assert reached == [*fields, "generate", "text"]

    requests = [e["params"] for e in tab.events if e["method"] == "Network.requestWillBeSent"]
    assert all(r["request"]["url"].startswith((url, "data:")) for r in requests)
    assert not [e for e in tab.events if e["method"] == "Runtime.exceptionThrown"]
    # Only refusals for the key are logged; what the policy forbids would be too.
    logged = [e["params"]["entry"] for e in tab.events if e["method"] == "Log.entryAdded"]
    assert {entry["text"].partition("status of ")[2][:3] for entry in logged} == {"401"}
