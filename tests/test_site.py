"""The site as a browser has it, opened from files: searches, links, the console, and pages on a narrow screen.

Needs mkdocs-material and mkdocstrings (the extra `docs`), matplotlib and Chromium.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NARROW = {"width": 400, "height": 900, "deviceScaleFactor": 1, "mobile": False}
# Words that people type, and pages: one of them has to be among the first three hits.
SEARCHES = {
    "install": "quickstart",
    "samples": "terms command_line concepts",
    "safetensors": "checkpoints large-models hugging_face",
    "multi-node": "two_hosts",
    "Hugging Face": "hugging_face",
    "from_pretrained": "hugging_face",
    "save_pretrained": "hugging_face",
    "LoRA": "hugging_face examples",
    "OOM": "bigger_model memory troubleshooting terms",
    "out of memory": "bigger_model memory troubleshooting",
    "memory_limit": "options memory",
    "sbatch": "two_hosts",
    "SLURM": "two_hosts",
    "torchrun": "two_hosts from-ddp",
    "NCCL": "gpus",
    "TensorBoard": "monitoring",
    "wandb": "monitoring",
    "MFU": "monitoring terms",
    "tokens/s": "monitoring terms",
    "throughput": "monitoring slow",
    "global batch": "terms from-ddp",
    "micro-batch": "terms concepts",
    "gradient accumulation": "terms from-ddp",
    "ZeRO": "terms coming_from",
    "FSDP": "terms coming_from",
    "bubble": "concepts monitoring",
    "resume": "checkpoints",
    "checkpoint": "checkpoints",
    "bf16": "options gpus compatibility",
    "recompute": "memory",
    "schedule": "choosing schedules options",
    "GAN": "troubleshooting compatibility capture",
    "LightningCLI": "examples options",
    "Hydra": "examples options",
    "deadlock": "troubleshooting",
    "hang": "troubleshooting",
    "elastic": "terms troubleshooting",
    "BatchNorm": "capture compatibility",
}
SEARCH = """new Promise(async answer => {
  const input = document.querySelector("[data-md-component=search-query]")
  const meta = document.querySelector(".md-search-result__meta")
  const until = has => new Promise(done => {
    const look = () => has(meta.textContent) ? done() : requestAnimationFrame(look)
    look()
  })
  const type = text => { input.value = text; input.dispatchEvent(new Event("keyup", {bubbles: true})) }
  if (!document.querySelector("#__search").checked) document.querySelector("#__search").click()
  type("")
  await until(text => text.includes("Type to start"))
  type(WORDS)
  await until(text => /matching/.test(text))
  const hits = [...document.querySelectorAll(".md-search-result__item")].slice(0, 3)
  answer(hits.map(hit => hit.querySelector("a").pathname))
})"""


class Browser:
    """A page of a headless Chromium, by its DevTools protocol."""

    def __init__(self, folder: Path) -> None:
        aiohttp = pytest.importorskip("aiohttp")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "about:blank"]
        command = [str(CHROMIUM), f"--user-data-dir={folder}", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        assert self.process.stderr is not None
        address = next(line.split()[-1] for line in self.process.stderr if "DevTools listening" in line)
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # a full pipe would stop the browser
        self.loop = asyncio.new_event_loop()
        self.errors: list[str] = []
        self.calls = 0
        self.loop.run_until_complete(self._connect(aiohttp, urlsplit(address).netloc))
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    async def _connect(self, aiohttp: Any, netloc: str) -> None:
        self.session = aiohttp.ClientSession()
        async with self.session.get(f"http://{netloc}/json/list") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        self.socket = await self.session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, until: str = "", **values: Any) -> Any:
        """Return what a method answers; wait for an event also, if one is named."""
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, until, values), 60))

    async def _call(self, method: str, until: str, values: dict[str, Any]) -> Any:
        self.calls += 1
        await self.socket.send_json({"id": self.calls, "method": method, "params": values})
        result, has_come = None, not until
        while result is None or not has_come:
            message = await self.socket.receive_json()
            if message.get("id") == self.calls:
                result = message.get("result", message)
            has_come |= message.get("method") == until
            self._hear(message)
        return result

    def _hear(self, message: dict[str, Any]) -> None:
        values = message.get("params", {})
        match message.get("method"):
            case "Log.entryAdded" if values["entry"]["level"] == "error":
                self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
            case "Runtime.exceptionThrown":
                self.errors.append(str(values["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if values["type"] == "error":
                self.errors.append(str(values["args"]))

    def open(self, path: Path) -> None:
        self.call("Page.navigate", until="Page.loadEventFired", url=path.as_uri())

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "value" in answer["result"], answer
        return answer["result"]["value"]

    def close(self) -> None:
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        self.process.terminate()
        self.process.wait(30)


class Links(HTMLParser):
    """Targets and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does, in a folder of its own."""
    for name in ("mkdocs", "material", "mkdocstrings", "matplotlib"):
        pytest.importorskip(name, reason="the site is built with the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "benchmarks", "lightning_pipe", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    for words in (["benchmarks.site"], ["mkdocs", "build", "--strict", "--quiet"]):
        built = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def pages(site: Path) -> list[Path]:
    """List the pages of the site."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


@pytest.mark.slow
def test_words_that_people_type_find_their_page_among_the_first_three(browser: Browser, site: Path) -> None:
    browser.open(site / "index.html")
    misses = {}
    for words, names in SEARCHES.items():
        hits = [Path(path).stem for path in browser.evaluate(SEARCH.replace("WORDS", repr(words)))]
        if not set(names.split()) & set(hits):
            misses[words] = hits
    assert not misses


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_file_and_a_place_in_it(site: Path) -> None:
    links = {path: Links(path) for path in pages(site)}
    broken = []
    for path, page in links.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or target.startswith("data:"):
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file() or (file in links and unquote(parts.fragment) not in links[file].anchors):
                broken.append(f"{path.relative_to(site)}: {target}")
    assert links and not broken


@pytest.mark.slow
def test_pages_raise_no_errors_and_are_as_wide_as_a_narrow_screen(browser: Browser, site: Path) -> None:
    browser.call("Emulation.setDeviceMetricsOverride", **NARROW)
    wide = {}
    for path in pages(site):
        browser.open(path)
        if (width := browser.evaluate("document.documentElement.scrollWidth")) > NARROW["width"]:
            wide[path.name] = width
    assert not wide
    assert not browser.errors


@pytest.mark.slow
def test_pictures_have_the_colour_of_a_dark_page_behind_them(browser: Browser, site: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    browser.open(site / "concepts.html")
    browser.evaluate("document.body.dataset.mdColorScheme = 'slate'")
    box = browser.evaluate("document.querySelector('.md-typeset img').getBoundingClientRect().toJSON()")
    corner = {"x": box["x"] - 3, "y": box["y"] + 6, "width": 12, "height": 1, "scale": 1}
    data = base64.b64decode(browser.call("Page.captureScreenshot", format="png", clip=corner)["data"])
    colours = image.open(io.BytesIO(data)).convert("RGB").getcolors()
    assert colours and len(colours) == 1 and max(colours[0][1]) < 80
