"""Opens a report in headless Chromium and says what is wrong with it: `python3 browser.py CHROMIUM PAGE.html [SHOTS]`.

Speaks the DevTools protocol over a pipe, so that nothing has to be installed beside the browser. Each finding is a line on
standard output; none is a success. With SHOTS, a folder, screenshots are left there to be looked at.

Looked at, in the light and the dark scheme, on a desk and on a phone, and printed: nothing is said on the console and
nothing is asked of the network; the page never scrolls sideways; text has a contrast of 4.5 to 1 with its background, marks
of pictures 3 to 1; every link, button and cell has a name; the tabulator reaches every cell of a heat map, with an outline
that can be seen; tables sort; links lead somewhere; ids are unique.
"""

import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAIT_SECONDS = 60
MOST_TABS = 3000

# Colours are the browser's own, as rgb(); a background that is not opaque lies on its parent's.
CHECK = r"""
(() => {
  const wrong = [];
  const channels = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = channels(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const where = (e) => `<${e.tagName.toLowerCase()} class="${e.getAttribute("class") || ""}"> ${e.textContent.trim().slice(0, 40)}`;
  // A few of each kind: one fault of a style sheet is a fault of every line.
  const said = {};
  const say = (text) => {
    const kind = text.split(" ")[0];
    said[kind] = (said[kind] || 0) + 1;
    if (said[kind] <= 5 && !wrong.includes(text)) wrong.push(text);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let texts = 0;
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ["SCRIPT", "STYLE", "TITLE", "title"].includes(e.tagName)) continue;
    const style = getComputedStyle(e);
    const box = e.getBoundingClientRect();
    if (style.visibility === "hidden" || style.display === "none" || box.width === 0 || box.right < 0) continue;
    const ink = channels(e instanceof SVGElement ? style.fill : style.color);
    const ratio = contrast(ink, behind(e));
    texts += 1;
    if (ratio < 4.5) say(`contrast ${ratio.toFixed(2)} of ${where(e)}`);
  }
  if (texts < 50) say(`only ${texts} texts are visible`);
  for (const mark of document.querySelectorAll("svg .mark, svg .line, svg .faster, svg .slower, svg .level")) {
    const style = getComputedStyle(mark);
    const fill = mark.matches(".full, .faster, .slower, .level") ? style.fill : style.stroke;
    const ratio = contrast(channels(fill), behind(mark));
    if (ratio < 3) say(`contrast ${ratio.toFixed(2)} of a mark ${mark.getAttribute("class")} in ${where(mark.closest("svg").parentElement)}`);
  }
  for (const bar of document.querySelectorAll(".seg:not(.free):not(.holes), .fill")) {
    const ratio = contrast(channels(getComputedStyle(bar).backgroundColor), channels(getComputedStyle(document.body).backgroundColor));
    if (ratio < 3 && !bar.matches(".over")) say(`contrast ${ratio.toFixed(2)} of a bar ${bar.className}`);
  }
  for (const e of document.querySelectorAll("a, button, input, [tabindex], [role=img]")) {
    const title = e.querySelector("title");
    const label = e.labels && e.labels[0] && e.labels[0].textContent;
    const name = e.getAttribute("aria-label") || (title && title.textContent) || e.textContent || label;
    if (!name || !name.trim()) say(`no name: ${e.outerHTML.slice(0, 120)}`);
  }
  for (const e of document.querySelectorAll("a[href^='#']")) {
    if (!document.getElementById(decodeURIComponent(e.getAttribute("href").slice(1)))) say(`leads nowhere: ${e.getAttribute("href")}`);
  }
  for (const e of document.querySelectorAll("[href], [src]")) {
    const to = e.getAttribute("href") || e.getAttribute("src");
    if (!/^(#|data:,)/.test(to)) say(`leads out of the page: ${to.slice(0, 80)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) say(`id ${id} is there twice`);
  const heads = [...document.querySelectorAll("h1, h2, h3")].map((e) => Number(e.tagName[1]));
  heads.forEach((level, at) => { if (level > (heads[at - 1] || 0) + 1) say(`a heading of level ${level} after ${heads[at - 1]}`); });
  const root = document.scrollingElement;
  // A phone's inner width grows with what is too wide; its layout does not.
  const width = Math.min(window.innerWidth, root.clientWidth);
  if (root.scrollWidth > width) {
    const wide = [...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > width + 1 && !e.closest(".scroll"));
    say(`scrolls sideways: ${root.scrollWidth} of ${width} px; ${wide.slice(0, 3).map(where).join("; ")}`);
  }
  return wrong;
})()
"""

SORT = r"""
(() => {
  const wrong = [];
  const table = document.getElementById("all");
  if (!table) return wrong;
  const values = (at) => [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
  const at = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.startsWith("chunk"));
  const button = table.tHead.rows[0].cells[at].querySelector("button");
  if (!button) return ["the heads of the table are no buttons"];
  for (const sign of [1, -1]) {
    button.click();
    const seen = values(at).map(Number);
    if (seen.some((value, n) => n > 0 && sign * (seen[n - 1] - value) > 0)) wrong.push(`not sorted by chunk: ${seen.slice(0, 20)}`);
  }
  const input = document.querySelector(".filter input");
  input.value = "no such text anywhere";
  input.dispatchEvent(new Event("input"));
  if ([...table.tBodies[0].rows].some((row) => !row.hidden)) wrong.push("the filter hides nothing");
  input.value = "";
  input.dispatchEvent(new Event("input"));
  if ([...table.tBodies[0].rows].some((row) => row.hidden)) wrong.push("an empty filter hides lines");
  return wrong;
})()
"""

FOCUSED = r"""
(() => {
  const e = document.activeElement;
  if (!e || e === document.body) return null;
  const style = getComputedStyle(e);
  const seen = (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2) || !!e.closest("svg");
  return { heat: !!e.closest(".heat td"), href: e.getAttribute("href"), seen, what: e.outerHTML.slice(0, 100) };
})()
"""


class Browser:
    """A Chromium that is told what to do over two pipes."""

    def __init__(self, program, profile):
        to_browser, self.out = os.pipe()
        self.into, from_browser = os.pipe()
        # The browser reads on 3 and writes on 4. The shell puts them there, and becomes the browser.
        shell = f"exec 3<&{to_browser} 4>&{from_browser}; exec \"$0\" \"$@\""
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number = 0
        self.rest = b""
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    session = None

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def read(self):
        until = time.monotonic() + WAIT_SECONDS
        while b"\0" not in self.rest:
            part = os.read(self.into, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self.rest += part
            if time.monotonic() > until:
                raise RuntimeError("the browser does not answer")
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def wait_for(self, method):
        for at, event in enumerate(self.events):
            if event.get("method") == method:
                return self.events.pop(at)
        while True:
            event = self.read()
            if event.get("method") == method:
                return event
            self.events.append(event)

    def value(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def close(self):
        self.process.kill()
        self.process.wait()


def visit(browser, page, width, height, scheme, phone):
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
    media = [{"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", media="screen", features=media)
    browser.events.clear()
    browser.call("Page.navigate", url=page)
    browser.wait_for("Page.loadEventFired")


def complaints(browser, page):
    """What the page said on the console and asked of the network since it was visited."""
    wrong = []
    for event in browser.events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            wrong.append(f"threw: {params['exceptionDetails']['text']}")
        elif method == "Runtime.consoleAPICalled":
            wrong.append(f"console: {params['args']}")
        elif method == "Log.entryAdded":
            wrong.append(f"log: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url.split("#")[0] != page and not url.startswith("data:"):
                wrong.append(f"asked for {url}")
    return wrong


def keyboard(browser):
    """The cells that the tabulator reaches, of those there are; and what has the focus and does not show it."""
    wrong = []
    cells = set(browser.value("[...document.querySelectorAll('.heat td a')].map((e) => e.getAttribute('href'))"))
    reached, unseen = set(), set()
    first = None
    for press in range(MOST_TABS):
        for kind in ("keyDown", "keyUp"):
            browser.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        focused = browser.value(FOCUSED)
        if focused is None and press > 0:
            break
        if focused is None:
            continue
        first = first or focused
        if focused["heat"]:
            reached.add(focused["href"])
        if not focused["seen"]:
            unseen.add(focused["what"])
        if reached == cells and press > 40:
            break
    if cells - reached:
        wrong.append(f"the tabulator reaches {len(reached)} of {len(cells)} cells of heat maps")
    if first and first["href"] != "#main":
        wrong.append("the first stop of the tabulator is not the link past the head")
    wrong += [f"has the focus and does not show it: {what}" for what in sorted(unseen)[:5]]
    # Arrow keys move between neighbours.
    moved = browser.value(
        "(() => { const all = [...document.querySelectorAll('.heat')].find((t) => t.rows[1] && t.rows[1].querySelectorAll('a').length > 1);"
        "if (!all) return true; const [a, b] = all.rows[1].querySelectorAll('a'); a.focus();"
        "a.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true })); return document.activeElement === b; })()"
    )
    if not moved:
        wrong.append("an arrow key does not move to the next cell")
    return wrong


def main():
    program, page = sys.argv[1], Path(sys.argv[2]).resolve().as_uri()
    shots = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    wrong = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.call(f"{domain}.enable")
            for name, width, height, scheme, phone in (
                ("desk-light", 1280, 900, "light", False),
                ("desk-dark", 1280, 900, "dark", False),
                ("phone-light", 390, 844, "light", True),
                ("phone-dark", 390, 844, "dark", True),
            ):
                visit(browser, page, width, height, scheme, phone)
                found = browser.value(CHECK)
                if name == "desk-light":
                    found += browser.value(SORT) + keyboard(browser)
                wrong += [f"{name}: {what}" for what in found + complaints(browser, page)]
                if shots:
                    picture = browser.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
                    (shots / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))
            printed = browser.call("Page.printToPDF", printBackground=True)
            if not base64.b64decode(printed["data"]).startswith(b"%PDF"):
                wrong.append("cannot be printed")
            # Without its script the page must hold the same text.
            browser.call("Emulation.setScriptExecutionDisabled", value=True)
            visit(browser, page, 1280, 900, "light", False)
            wrong += [f"without script: {what}" for what in complaints(browser, page) if "script" not in what.lower()]
        finally:
            browser.close()
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


main()
