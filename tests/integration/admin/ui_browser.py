"""What the dashboard's tests do in a real browser: pages that note every complaint, and measures taken from the page."""

from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, Page, expect

PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)  # else five seconds, of a browser on a busy machine
WATCH = """
addEventListener('securitypolicyviolation', (event) => complain(`${event.violatedDirective} ${event.blockedURI}`));
"""
# Text that a user reads, with its colour and what lies behind it; 4.5 is WCAG's AA for text of any size.
CONTRAST = """
() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const paper = canvas.getContext('2d', { willReadFrequently: true });
  const parsed = new Map();
  const parse = (text) => {
    if (!parsed.has(text)) {
      paper.clearRect(0, 0, 1, 1);
      paper.fillStyle = text;
      paper.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = paper.getImageData(0, 0, 1, 1).data;
      parsed.set(text, [r, g, b, a / 255]);
    }
    return parsed.get(text);
  };
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    const canvas = matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0, 1] : [255, 255, 255, 1];
    return layers.reverse().reduce((below, layer) => over(layer, below), canvas);
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.getClientRects().length || element.closest('.hidden-text, option, noscript, :disabled')) continue;
    const style = getComputedStyle(element);
    if (style.visibility === 'hidden') continue;
    const behind = ground(element);
    const text = over(parse(element instanceof SVGElement ? style.fill : style.color), behind);
    const [one, two] = [light(text), light(behind)].sort((a, b) => b - a);
    found.push([(one + 0.05) / (two + 0.05), `${element.tagName}.${element.getAttribute('class')}: ${walk.currentNode.data.trim().slice(0, 40)}`]);
  }
  return found;
}
"""


class Tab:
    """A tab at a gateway. said: what the browser's policy has refused, and what the console was told as an error;
    hosts: who was asked for anything."""

    def __init__(self, browser: Browser, url: str, **settings: Any) -> None:
        self.url = url
        self.said: list[str] = []
        self.hosts: set[str] = set()
        settings.setdefault("viewport", {"width": 1280, "height": 900})
        self.context: BrowserContext = browser.new_context(**settings)
        self.context.set_default_timeout(PATIENCE_MS)
        self.context.expose_function("complain", self._complained)
        self.context.add_init_script(WATCH)
        self.page: Page = self.context.new_page()
        self.page.on("console", lambda m: self.said.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.said.append(f"uncaught: {error}"))
        self.page.on("request", self._asked)

    def _complained(self, text: str) -> None:
        self.said.append(text)

    def _asked(self, request: Any) -> None:
        self.hosts.add(urlsplit(request.url).netloc)

    def enter(self, token: str, view: str = "cluster") -> Page:
        """Signed in, with a view shown."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/ui/#token={token}")
        self.main_heading()
        if view != "cluster":
            self.go(view)
        return self.page

    def go(self, view: str) -> None:
        """Another view, from an empty tab, once it has something to show."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/ui/#/{view}")
        self.main_heading()

    def main_heading(self) -> None:
        expect(self.page.locator("main h1")).to_be_visible(timeout=PATIENCE_MS)

    def contrasts(self) -> list[tuple[float, str]]:
        """Of each text on the page: its contrast, and where it is. The least first."""
        # What is on its way to another colour has no contrast yet.
        self.page.evaluate(
            "Promise.allSettled(document.getAnimations().map((each) => each.finished))"
        )
        found: list[list[Any]] = self.page.evaluate(CONTRAST)
        assert found, "no text at all"
        return sorted((ratio, where) for ratio, where in found)

    def focused(self) -> str:
        """What has the focus, in a word or two."""
        return str(
            self.page.evaluate(
                "(() => { const e = document.activeElement; return e.getAttribute('aria-label') || "
                "e.innerText?.trim().replace(/\\s+/g, ' ') || e.id || e.tagName; })()"
            )
        )

    def focus_is_seen(self) -> bool:
        """Whether something is drawn around what has the focus, or around the card that it stands for."""
        return bool(
            self.page.evaluate(
                "[document.activeElement, document.activeElement.closest('.node')].some((e) => e && "
                "getComputedStyle(e).outlineStyle !== 'none' && parseFloat(getComputedStyle(e).outlineWidth) >= 2)"
            )
        )

    def close(self) -> None:
        self.context.close()
