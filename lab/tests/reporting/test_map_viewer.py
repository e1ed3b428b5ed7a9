"""The viewer of attention maps: its images hold the maps, and the page runs no script but its own."""

import base64
import hashlib
import io
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.diagnostics import LEVELS, map_viewer

MAPS = {
    "layer 0, attention": np.random.default_rng(0).random((2, 7, 7)),
    "layer 1, scores e": np.random.default_rng(1).standard_normal((3, 7, 5)).astype(np.float32),
    "layer 2, attention": np.full((1, 7, 7), 0.25),
}


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def policy(self):
        (policy,) = (tag["content"] for tag in self.all("meta") if "http-equiv" in tag)
        return policy


def page_with(*pieces: html.Piece) -> Page:
    return Page(html.page("title", "lead", [], [html.Section("maps", "Maps", pieces)], "footer"))


def decoded(uri: str) -> Image.Image:
    kind, _, content = uri.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(content)))


def values(image: dict, scale: str) -> np.ndarray:
    """What the script reads: the value that the scale has at the pixel's colour."""
    colors, pixels = (
        np.asarray(decoded(picture).convert("RGB")).astype(int) @ [1 << 16, 1 << 8, 1]
        for picture in (scale, image["src"])
    )
    found, places = np.unique(colors[0], return_index=True)
    assert len(found) == LEVELS, "every level has a colour of its own"
    assert np.isin(pixels, found).all()
    levels = places[np.searchsorted(found, pixels)]
    low, high = float(image["data-low"]), float(image["data-high"])
    return low + levels / (LEVELS - 1) * (high - low)


def shown(page: Page) -> tuple[list[dict], str]:
    *maps, scale = page.all("img")
    return maps, scale["src"]


def test_the_images_hold_every_head_of_every_map():
    images, scale = shown(page_with(map_viewer(MAPS)))
    heads = [(title, head, matrix) for title, array in MAPS.items() for head, matrix in enumerate(array)]
    for (title, head, matrix), image in zip(heads, images, strict=True):
        half_a_level = (matrix.max() - matrix.min()) / (LEVELS - 1) / 2
        np.testing.assert_allclose(values(image, scale), matrix, rtol=1e-6, atol=1.001 * half_a_level)
        assert image["alt"].startswith(f"{title}, head {head}: a row per ")
        names = ("token", "component") if "scores" in title else ("query", "key")
        assert (image["data-row"], image["data-column"]) == names


@pytest.mark.parametrize("folded", [False, True])
def test_the_policy_admits_this_script_and_no_other(folded):
    viewer = map_viewer(MAPS)
    page = page_with(html.Folded("more", [viewer]) if folded else viewer)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert page.policy == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_a_hostile_name_of_a_layer_is_text():
    page = page_with(map_viewer({'"><script>alert(1)</script>, attention': MAPS["layer 0, attention"]}))
    assert len(page.scripts) == 1
    assert "alert" not in page.scripts[0]


@pytest.mark.skipif(shutil.which("node") is None, reason="node reads the script")
def test_the_script_is_read_without_an_error():
    script = Path(html.__file__).parent / "templates" / "viewer.js"
    subprocess.run(["node", "--check", str(script)], check=True, capture_output=True, timeout=60)
