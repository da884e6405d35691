"""The atlas in a real browser: what is clicked, typed and seen, at the widths of a desk and of a phone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import blockgate as bg
from tests.inspect.atlas_page import HISTORY, lstm_record

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
BROWSER = os.environ.get("BLOCKGATE_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt install chromium")

WORDS = ("the gate opens a block and the next word opens another one " * 3).split()
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}

# For each block of the first map, whether the pixel in its middle has another colour than a closed block.
LIT = """() => {
  const canvas = document.querySelector("#maps canvas"), [rows, columns] = gates[0].grid;
  const pixels = canvas.getContext("2d"), closed = ramps.lit[0].join();
  return Array.from({ length: rows * columns }, (_, block) => {
    const x = (block % columns + 0.5) * canvas.width / columns;
    const y = (Math.floor(block / columns) + 0.5) * canvas.height / rows;
    return [...pixels.getImageData(Math.floor(x), Math.floor(y), 1, 1).data].slice(0, 3).join() !== closed;
  });
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        # Machines that run tests as root, in a container, have no sandbox.
        running = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def record():
    return lstm_record(WORDS, classes=4)


@pytest.fixture(scope="module")
def file(record, tmp_path_factory):
    names = ["zero", "one", "two", "three"]
    return record.to_html(
        tmp_path_factory.mktemp("atlas") / "atlas.html", tokens=WORDS, class_names=names, history=HISTORY
    )


@pytest.fixture
def visit(browser):
    """Opens pages; whatever they complain of, or ask of others, fails the test."""
    contexts, asked, complaints = [], [], []

    def open_page(file: Path, **options):
        context = browser.new_context(**{"viewport": DESK, "color_scheme": "light"} | options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints
    assert all(url.startswith("file://") for url in asked)


def wait_until(page, condition):
    """Playwright's own waiting evaluates text inside of the page, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(f"Boolean({condition})"):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def open_blocks(record, token, gate="ih_l0"):
    return (record.gates[gate].trace[token] != 0).tolist()


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_click_on_a_token_lights_its_blocks(visit, file, record, viewport, scheme, tmp_path):
    page = visit(file, viewport=viewport, color_scheme=scheme)
    assert page.evaluate(LIT) == open_blocks(record, 0)
    page.get_by_role("radio").nth(7).click()
    assert page.evaluate(LIT) == open_blocks(record, 7) != open_blocks(record, 0)
    assert page.locator("#now").inner_text() == f"{WORDS[7]} 8 of {len(WORDS)}"
    count = sum(open_blocks(record, 7))
    assert f"Opens {count} of 72 blocks" in page.locator("#gate-0 .stat").inner_text()
    # Nothing hangs over the edge.
    assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.stat().st_size > 20_000


def test_keys_slider_and_buttons_step_through_the_text(visit, file, record):
    page = visit(file)
    now = page.locator("#now")
    page.get_by_role("radio", checked=True).focus()
    for key, number in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", len(WORDS)), ("Home", 1)):
        page.keyboard.press(key)
        assert now.inner_text().endswith(f" {number} of {len(WORDS)}")
        assert page.evaluate("document.activeElement.getAttribute('aria-checked')") == "true"
    page.locator("#slider").fill("5")
    assert page.evaluate(LIT) == open_blocks(record, 5)
    assert page.locator("#slider").get_attribute("aria-valuetext") == f"{WORDS[5]}, 6 of {len(WORDS)}"
    page.get_by_role("button", name="Next token").click()
    page.get_by_role("button", name="Token before").click()
    assert page.evaluate(LIT) == open_blocks(record, 5)
    page.get_by_role("button", name="Play").click()
    wait_until(page, "view.token > 5")
    page.get_by_role("button", name="Pause").click()
    stopped = now.inner_text()
    page.wait_for_timeout(900)
    assert now.inner_text() == stopped


def test_maps_of_how_often_and_how_large(visit, file, record):
    page = visit(file)
    gate = record.gates["ih_l0"]
    for name in ("How often", "How large"):
        page.get_by_role("button", name=name).click()
        assert page.get_by_role("button", name=name).get_attribute("aria-pressed") == "true"
        assert page.evaluate(LIT) == (gate.open_counts > 0).tolist()
    page.get_by_role("button", name="How often").click()
    assert f"{gate.measured_density:.1%} open on average" in page.locator("#gate-0 .stat").inner_text()
    page.get_by_role("button", name="Class").click()
    page.locator("#klass").select_option("two")
    assert "“two”" in page.locator("#gate-0 .stat").inner_text()
    assert page.evaluate(LIT) == (gate.class_open_counts[2] > 0).tolist()


def test_a_block_is_read_by_pointer_and_by_keys_and_marks_the_tokens_that_open_it(visit, file, record):
    page = visit(file)
    gate = record.gates["ih_l0"]
    rows, columns = gate.grid.out_blocks, gate.grid.in_blocks
    canvas, readout = page.locator("#gate-0 canvas"), page.locator("#gate-0 .readout")
    box = canvas.bounding_box()
    block = 3 * columns + 2
    canvas.click(position={"x": (2 + 0.5) * box["width"] / columns, "y": (3 + 0.5) * box["height"] / rows})
    said = readout.inner_text()
    assert "Block 4, 3: outputs 48 to 63, inputs 16 to 23." in said
    assert f"mean gate {gate.value_sum[block] / gate.open_counts[block]:.2f}" in said
    opens = (gate.trace[:, block] != 0).tolist()
    assert any(opens)
    assert not all(opens)
    marked = page.evaluate("tokenButtons.map((button) => button.classList.contains('opens'))")
    assert marked == opens
    assert f"Open for {sum(opens)} of {len(WORDS)} tokens" in said
    page.keyboard.press("Escape")
    assert not page.evaluate("document.querySelectorAll('.opens').length")
    canvas.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "Block 2, 2: outputs 16 to 31, inputs 8 to 15." in readout.inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("tokenButtons.map((button) => button.classList.contains('opens'))") == (
        (gate.trace[:, columns + 1] != 0).tolist()
    )


def test_overlaps_of_tokens_and_classes(visit, file, record):
    page = visit(file)
    page.locator("#token-pairs canvas").scroll_into_view_if_needed()
    wait_until(page, "tokenPairs.table && classPairs.table")
    page.locator("#token-gates").select_option("ih_l1")
    opened = (record.gates["ih_l1"].trace != 0).double()
    counts = opened.sum(1)
    want = 2 * (opened @ opened.T) / (counts[:, None] + counts)
    torch.testing.assert_close(torch.tensor(page.evaluate("tokenPairs.table")), want.flatten().float())
    canvas = page.locator("#token-pairs canvas")
    box, cell = canvas.bounding_box(), len(WORDS)
    place = {"x": 4.5 * box["width"] / cell, "y": 2.5 * box["height"] / cell}
    canvas.hover(position=place)
    assert (
        page
        .locator("#token-pairs .readout")
        .inner_text()
        .startswith(f"3 “{WORDS[2]}” and 5 “{WORDS[4]}”: {want[2, 4]:.1%} of their open blocks")
    )
    canvas.click(position=place)
    # Maps out of sight are drawn when they come into it.
    page.locator("#gate-0").scroll_into_view_if_needed()
    wait_until(page, "maps[0].visible")
    assert page.evaluate(LIT) == open_blocks(record, 4)
    page.locator("#class-gates").select_option("hh_l0")
    want = record.gates["hh_l0"].class_overlap()
    assert page.evaluate("classPairs.table") == pytest.approx(want.flatten().tolist())
    page.locator("#class-pairs canvas").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert "“one” and “one”" in page.locator("#class-pairs .readout").inner_text()
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="Class").get_attribute("aria-pressed") == "true"
    assert page.locator("#klass").input_value() == "1"


def test_shares_over_training_are_drawn_and_listed(visit, file):
    page = visit(file)
    label = page.locator("#history svg").get_attribute("aria-label")
    assert "Epoch 2: 25.0% always on, 50.0% input dependent, 12.5% rarely open, 12.5% dead." in label
    assert page.locator("#history path.kind").count() == 4
    page.get_by_text("The same as a table").click()
    assert page.locator("#history tbody tr").nth(1).inner_text().split() == ["2", "25.0%", "50.0%", "12.5%", "12.5%"]
    assert page.locator("#shares tbody tr").count() == 4


def test_light_and_dark_at_a_click_and_as_the_machine_says(visit, file):
    page = visit(file)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between").click()
    dark = page.evaluate(ground)
    assert dark != light
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        wait_until(page, f"document.documentElement.dataset.theme === '{scheme}'")
    assert page.evaluate(ground) == light
    assert visit(file, color_scheme="dark").evaluate(ground) == dark


def test_everything_that_can_be_used_has_a_name_and_every_map_a_text(visit, file):
    page = visit(file)
    used = "button, select, input, canvas[tabindex], svg, [role=region]"
    unnamed = page.evaluate(
        """(used) => [...document.querySelectorAll(used)]
        .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
        .map((one) => one.outerHTML)""",
        used,
    )
    assert not unnamed
    # One stop for the text, however long it is.
    assert page.locator('[role="radio"][tabindex="0"]').count() == 1
    assert "Opens" in page.locator("#gate-0 canvas").get_attribute("aria-label")


def test_without_tokens_classes_and_history_their_parts_are_gone(visit, tmp_path):
    torch.manual_seed(0)
    layer = bg.DynamicSparseLinear(64, 64, block_size=8, sparsity=0.75)
    with torch.no_grad(), bg.record_gates(layer) as record:
        layer(torch.randn(50, 64))
    page = visit(record.to_html(tmp_path / "a.html"))
    for part in ("#player", "#text-card", "#overlap", "#history", "#mode-token", "#mode-klass"):
        assert page.locator(part).is_hidden(), part
    assert page.evaluate(LIT) == (record.gates["gate"].open_counts > 0).tolist()
