#!/usr/bin/env python3
"""The study's report in a browser: sorted by a click, values under the pointer, on a phone and on a desk.

report_page.py CONVERGENCE COLLECTIVES PIPELINE [FOLDER]   pictures of the pages go to FOLDER

Trains a tiny study, opens its report.html and the drawings of the two other programs in Chromium without a window
(skipped where there is none) and fails on an error in the console or the page, on any request but the page's own, and
where the page is wider than the window. The
browser is driven through a pipe by its DevTools protocol.
"""
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]
WIDTHS = {"phone": 360, "desk": 1280}
LARGEST_PAGE = 1_000_000
STUDY = ["--layers", "2", "--width", "32", "--heads", "2", "--sequence", "32", "--batch", "4", "--data-limit", "200k",
         "--validation-sequences", "10", "--device", "cpu", "--tokens", "3840", "--seeds", "1,2", "--processes", "2",
         "--arms", "fused-adamw,adamw,onebit-adam,onebit-lamb,curriculum-reshape,recompute,shards"]


class Browser:
    """One page. `requests` and `errors` collect what it asked for and complained of."""

    def __init__(self, program, folder):
        to_browser, self.to_browser = os.pipe()
        self.from_browser, from_browser = os.pipe()
        # The protocol wants descriptors 3 and 4, whatever the pipes' numbers are.
        self.process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "sh", program, "--headless", "--no-sandbox",
             "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}/profile", "about:blank"],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self.numbers, self.buffer, self.session = itertools.count(1), b"", None
        self.requests, self.errors, self.loaded = [], [], False
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def close(self):
        os.close(self.to_browser)
        self.process.kill()
        self.process.wait()

    def message(self):
        while b"\0" not in self.buffer:
            read = os.read(self.from_browser, 1 << 16)
            if not read:
                sys.exit("the browser went away")
            self.buffer += read
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        method, about = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(about["exceptionDetails"].get("exception", about["exceptionDetails"]))
        elif method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and about["type"] == "error"):
            self.errors.append(about)
        elif method == "Page.loadEventFired":
            self.loaded = True
        return message

    def ask(self, method, **parameters):
        number = next(self.numbers)
        session = {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
        while True:
            message = self.message()
            if message.get("id") == number:
                if "error" in message:
                    sys.exit(f"{method}: {message['error']}")
                return message["result"]

    def open(self, path, width, dark):
        # A phone lays pages without a viewport of their own, as drawings are, out for a desk and shrinks them.
        phone = width < 600 and path.suffix == ".html"
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=phone)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.loaded = False
        self.ask("Page.navigate", url=path.as_uri())
        while not self.loaded:
            self.message()

    def value(self, expression):
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            sys.exit(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self, path):
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


COLUMN = """[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[%d].textContent)"""


def check_sorting(browser):
    """A click on a title sorts by amounts, a second one turns the order round; the swatches go with their rows."""
    titles = browser.value("[...document.querySelectorAll('table')[0].tHead.rows[0].cells].map(cell => cell.textContent)")
    column = titles.index("validation loss")
    click = f"document.querySelector('table').tHead.rows[0].cells[{column}].querySelector('button').click()"
    before = browser.value(COLUMN % column)
    for reverse in (False, True):
        browser.value(click)
        losses = [float(text.split(" ")[0]) for text in browser.value(COLUMN % column)]
        if losses != sorted(losses, reverse=reverse) or len(losses) != len(before):
            sys.exit(f"sorted by loss the table has {losses}, before {before}")
    amounts = browser.value("['1 h 02 min', '1 min 05 s', '59.0 s', '12.3MB', '1,234', '+0.5 ± 0.1', '-0.5', '-', 'step 6'].map(amount)")
    if amounts != [3720, 65, 59, 12.3e6, 1234, 0.5, -0.5, None, 6]:
        sys.exit(f"amounts of cells are taken for {amounts}")


def check_hover(browser, width):
    """The values of every line chart stand under the pointer, inside the window."""
    count = browser.value("document.querySelectorAll('svg.chart').length")
    shown = 0
    for i in range(count):
        browser.value(f"document.querySelectorAll('svg.chart')[{i}].scrollIntoView({{block: 'center'}})")
        box = browser.value(f"(b => [b.x, b.y, b.width, b.height])(document.querySelectorAll('svg.chart')[{i}].getBoundingClientRect())")
        for share in (0.2, 0.9):
            browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + share * box[2], y=box[1] + box[3] / 2)
            tip = browser.value("(t => t && [t.getBoundingClientRect().left, t.getBoundingClientRect().right, t.textContent])(document.querySelector('.tip'))")
            lines = browser.value(f"document.querySelectorAll('svg.chart')[{i}].querySelectorAll('g[data-points]').length")
            titles = browser.value(f"document.querySelectorAll('svg.chart')[{i}].querySelectorAll('title').length")
            if not lines and not titles:
                sys.exit(f"chart {i} shows no values")
            if not lines:
                continue
            if not tip or tip[0] < 0 or tip[1] > width:
                sys.exit(f"chart {i} at width {width}: what hovers is {tip}")
            shown += 1
    if shown < 10:
        sys.exit(f"only {shown} of {count} charts show values under the pointer")


def main(program, collectives, pipeline, pictures=None):
    browser_program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser_program:
        print(f"PACER_SKIPPED: none of {', '.join(BROWSERS)} is installed")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for command in ([program, *STUDY, "--output", name],
                        [collectives, "--quick", "--processes", "2", "--output", name],
                        [pipeline, "--stages", "4", "--svg", f"{name}/pipeline.svg"]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode != 0:
                sys.exit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        drawings = sorted(folder.glob("*.svg"))
        if len(drawings) < 4:
            sys.exit(f"only {drawings} were drawn")
        browser = Browser(browser_program, folder)
        try:
            pictures = Path(pictures or folder)
            pictures.mkdir(parents=True, exist_ok=True)
            check_report(browser, folder / "report.html", pictures)
            for drawing in drawings:
                check_drawing(browser, drawing, pictures)
        finally:
            browser.close()
    print("the report is sorted and shows its values at both widths, without errors and requests")


def check_report(browser, page, pictures):
    if page.stat().st_size > LARGEST_PAGE:
        sys.exit(f"{page.name} has {page.stat().st_size} bytes")
    for (kind, width), dark in itertools.product(WIDTHS.items(), (False, True)):
        open_page(browser, page, width, dark)
        browser.picture(pictures / f"report-{kind}-{'dark' if dark else 'light'}.png")
        check_hover(browser, width)
        check_sorting(browser)
        complain(browser, page)


def check_drawing(browser, page, pictures):
    """A whole drawing at both widths; each of its points and bars says its value."""
    for (kind, width), dark in itertools.product(WIDTHS.items(), (False, True)):
        open_page(browser, page, width, dark)
        hints = browser.value("document.querySelectorAll('rect > title, circle > title').length")
        if browser.value("document.querySelector('parsererror') !== null") or hints < 4:
            sys.exit(f"{page.name} cannot be read, or has only {hints} hints")
        browser.picture(pictures / f"{page.stem}-{kind}-{'dark' if dark else 'light'}.png")


def open_page(browser, page, width, dark):
    browser.requests, browser.errors = [], []
    browser.open(page, width, dark)
    wide = browser.value("document.documentElement.scrollWidth")
    if wide > width:
        sys.exit(f"at a width of {width} {page.name} is {wide} wide")
    complain(browser, page)


def complain(browser, page):
    foreign = [url for url in browser.requests if not url.startswith(("data:", page.as_uri()))]
    if browser.errors or foreign:
        sys.exit(f"{page.name} has errors {browser.errors} or asks for {foreign}")


main(*sys.argv[1:])
