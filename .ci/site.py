"""`python .ci/site.py FOLDER`: the built site loads nothing from elsewhere, and where a Chromium is, none of its pages
is wider than a telephone (390 px) or fails to load a picture."""

import functools
import http.server
import json
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from html.parser import HTMLParser
from pathlib import Path

WIDTH = 390
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
CHECK = """<!doctype html><title>check</title><script>
const pages = %s, wrong = [];
async function look(page) {
  const frame = document.createElement("iframe");
  frame.style = "border:0;width:%dpx;height:800px";
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const root = frame.contentDocument.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`${page}: ${root.scrollWidth} px wide`);
  for (const image of frame.contentDocument.images)
    if (!image.naturalWidth) wrong.push(`${page}: ${image.src} does not load`);
  frame.remove();
}
addEventListener("load", async () => {
  for (const page of pages) await look(page);
  await fetch("/told", {method: "POST", body: JSON.stringify(wrong)});
});
</script><body></body>"""


class Loaded(HTMLParser):
    """Addresses that a page loads by itself; where its links lead is no matter."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        loads = given.get("src", "") if tag != "link" else given.get("href", "") * (given.get("rel") != "canonical")
        self.found += [loads] if re.match(r"(https?:)?//", loads) else []


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of the site, without a line of log for each; takes what the browser found."""

    told: queue.Queue[list[str]] = queue.Queue()

    def do_POST(self) -> None:
        """What the browser found."""
        self.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    elsewhere = {page.name: found for page in pages if (found := loaded(page.read_text()))}
    styles = [
        each.name
        for each in site.rglob("*.css")
        if re.search(r"(url\(|@import )\s*[\"']?(https?:)?//", each.read_text())
    ]
    if elsewhere or styles:
        sys.exit(f"loaded from elsewhere: {elsewhere} {styles}")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser and (wrong := on_a_telephone(browser, site, pages)):
        sys.exit("\n".join(wrong))
    print(
        f"{len(pages)} pages, nothing from elsewhere, {f'none wider than {WIDTH} px' if browser else 'no browser here'}"
    )


def loaded(page: str) -> list[str]:
    parser = Loaded()
    parser.feed(page)
    return parser.found


def on_a_telephone(browser: str, site: Path, pages: list[Path]) -> list[str]:
    """What is wrong with the pages at the width of a telephone."""
    check = site / "check.html"
    check.write_text(CHECK % (json.dumps([str(page.relative_to(site)) for page in pages]), WIDTH))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        address = f"http://127.0.0.1:{server.server_port}/check.html"
        command = [browser, *QUIET, f"--user-data-dir={profile}", address]
        shown = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return Handler.told.get(timeout=120)
        except queue.Empty:
            return ["the browser did not get through the pages in two minutes"]
        finally:
            shown.terminate()
            shown.wait()
            server.shutdown()
            check.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
