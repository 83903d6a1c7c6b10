"""The report in a real browser: figures, network, phone width, dark mode.

Needs playwright (the extra `browser`) and a Chromium of the system: `apt-get install chromium`.
"""

import dataclasses
import os
import re
import shutil

import pytest

from fp8jax.lm.cli.page import report
from fp8jax.lm.figures.run_files import read_run
from fp8jax.lm.records.events import Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.numerics.names import as_recipe
from fp8jax.telemetry.files import StepFiles
from fp8jax.telemetry.rows import Row

pytestmark = pytest.mark.extended

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1200, "height": 900}
LINEARS = ("layers/attention/q", "layers/mlp/up", "layers/mlp/down")


def rows(step, outlier):
    recipe = as_recipe("fp8_block")
    row = Row(
        step=step,
        layer=0,
        linear="",
        operand="x",
        cast="fwd_x",
        what_if=False,
        recipe=recipe.name,
        format="e4m3",
        elements=4096,
        nonzero=4000,
        amax=2.0,
        scale=2.0**-8,
        smallest_scale=2.0**-9,
        bias=7,
        underflow=0.01 * step,
        saturation=0.001,
        sqnr_db=30.0,
        delay=None,
    )
    found = [
        dataclasses.replace(
            row, layer=layer, linear=linear, operand=operand, cast=cast, bias=7 - layer
        )
        for linear in LINEARS
        for layer in range(4)
        for operand, cast in (("x", "fwd_x"), ("w", "fwd_w"), ("g", "dgrad_g"))
    ]
    if outlier and step == 4:
        found[1] = dataclasses.replace(found[1], amax=2000.0)
    return found


def write_run(folder, outlier):
    with Metrics(folder, num_steps=40) as metrics:
        metrics.event(0, Event.START, jax="0.10.2", devices="1 x cpu")
        for step in range(1, 41):
            valid = {"valid_loss": 2.2} if step % 20 == 0 else {}
            metrics.write(step, {"loss": 2 + 4 / step, "step_s": 0.1, "tokens_per_s": 99.0} | valid)
        metrics.event(40, Event.PROMOTION, layers=[1])
        metrics.event(40, Event.END, reason="finished", seconds=4.0)
    folder.joinpath("config.json").write_text('{"num_steps": 40, "data": "python_stdlib"}')
    gemms = "layers/mlp/up  fp8_block.fwd  4  e4m3 x e4m3  4096 x 128 x 384  cublasLtMatmul\n"
    folder.joinpath("precision.txt").write_text(gemms * 3)
    for step in (2, 4):
        StepFiles(folder, 0 if step == 2 else 2).write(step, rows(step, outlier))
    return read_run(folder)


@pytest.fixture(scope="module")
def browser():
    missing = pytest.fail if "CI" in os.environ else pytest.skip  # .ci/run --all has both
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright: pip install -e '.[browser]'")
    found = [
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ]
    if not found:
        missing("no Chromium on PATH: apt-get install chromium")
    with sync_playwright() as playwright:
        # Chromium's sandbox does not start for root, as in containers.
        chromium = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    names = ("a_run_with_a_long_name_that_has_to_wrap_somewhere", "b")
    runs = [write_run(folder / name, name == "b") for name in names]
    page = folder / "report.html"
    page.write_text(report(runs), encoding="utf-8")
    return page.as_uri()


@pytest.fixture
def opened(browser, address):
    """A function that opens the page, and fails the test for errors and requests to elsewhere."""
    problems, pages = [], []

    def open_page(viewport, scheme="light"):
        page = browser.new_page(viewport=viewport, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda said: problems.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", lambda request: requested(request.url))
        page.goto(address)
        page.wait_for_function("[...document.images].every((image) => image.complete)")
        return page

    def requested(url):
        if url != address and not url.startswith("data:"):
            problems.append(f"request: {url}")

    yield open_page
    for page in pages:
        page.close()
    assert problems == []


# The share of pixels that have a color: axes and texts are gray.
COLORED = """(image) => {
  const canvas = document.createElement("canvas");
  canvas.width = 600; canvas.height = 400;
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, 600, 400);
  const bytes = context.getImageData(0, 0, 600, 400).data;
  let colored = 0;
  for (let i = 0; i < bytes.length; i += 4) {
    const rgb = [bytes[i], bytes[i + 1], bytes[i + 2]];
    colored += Math.max(...rgb) - Math.min(...rgb) > 40;
  }
  return colored / (600 * 400);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_have_content(opened, scheme):
    page = opened(DESKTOP, scheme)
    images = page.query_selector_all("img")
    # Losses; bias, underflow, saturation and promotions of each run. No run recorded its memory.
    assert len(images) == 1 + 2 * 4
    for image in images:
        assert len(image.get_attribute("alt")) > 30
        # A line of one pixel over a quarter of the width is 150 pixels of 240,000.
        assert image.evaluate(COLORED) > 5e-4, image.get_attribute("alt")
    sources = {image.evaluate("(image) => image.currentSrc") for image in images}
    assert len(sources) == len(images)


def test_first_words_are_what_to_look_at(opened):
    page = opened(DESKTOP)
    first = page.inner_text("#first")
    assert "Step 4: w of layers/attention/q in layer 0: its amax 2e+03 is" in first
    assert page.inner_text("main h2") == "In short"
    for link in page.query_selector_all("nav a"):
        assert page.query_selector(link.get_attribute("href")) is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_width_scrolls_in_tables_only(opened, scheme):
    page = opened(PHONE, scheme)
    for details in page.query_selector_all("details"):
        details.evaluate("(details) => { details.open = true }")
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    # Nothing sticks out but what lies in a region that scrolls, which the keyboard reaches.
    out = page.evaluate("""() => [...document.querySelectorAll("main *, header *")].filter(
        (e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll"))
        .map((e) => e.outerHTML.slice(0, 80))""")
    assert out == []
    regions = page.query_selector_all(".scroll")
    assert regions and all(r.get_attribute("tabindex") == "0" for r in regions)
    assert all(r.get_attribute("aria-label") for r in regions)
    size = page.evaluate("parseFloat(getComputedStyle(document.querySelector('td')).fontSize)")
    assert size >= 14


def test_the_pointer_shows_the_losses_of_a_step(opened):
    page = opened(DESKTOP)
    spots = page.query_selector_all("#loss .spot")
    assert len(spots) == 40 and not spots[20].query_selector("p").is_visible()
    spots[20].hover()
    said = spots[20].query_selector("p")
    assert said.is_visible() and said.inner_text().startswith("step 21\n")
    box = said.bounding_box()
    assert 0 <= box["x"] and box["x"] + box["width"] <= DESKTOP["width"]


def luminance(color):
    """Of "rgb(r, g, b)", as WCAG 2 defines it."""
    channels = [int(c) / 255 for c in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_contrast_in_both_modes(opened, scheme):
    page = opened(DESKTOP, scheme)
    pairs = page.evaluate("""() => {
      const behind = (e) => {
        for (; e; e = e.parentElement) {
          const color = getComputedStyle(e).backgroundColor;
          if (!color.startsWith("rgba(0, 0, 0, 0")) return color;
        }
      };
      const texts = [...document.querySelectorAll("body, body *")].filter(
        (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()));
      return texts.map((e) => [getComputedStyle(e).color, behind(e)]);
    }""")
    assert len(pairs) > 100
    for text, background in {tuple(pair) for pair in pairs}:
        dark, light = sorted([luminance(text), luminance(background)])
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, background)  # WCAG 2, level AA
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.05) == (scheme == "dark")
