"""A headless Chromium over its debugging pipe (the Chrome DevTools Protocol), for tests of pages; no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "Page", "chromium"]

_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--mute-audio"),
    *("--disable-component-update", "--disable-default-apps", "--disable-sync", "--force-color-profile=srgb"),
)

_LIMIT = 300.0  # seconds after which a browser hangs; on a busy machine one that works may need a minute for an answer


def chromium() -> str | None:
    """The path of the system's Chromium or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """A process of Chromium. Messages go through two pipes, each ended by a zero byte."""

    def __init__(self) -> None:
        path = chromium()
        if path is None:
            raise FileNotFoundError("no Chromium is installed: apt-get install chromium")
        self._profile = tempfile.TemporaryDirectory(prefix="lowtri-browser-", ignore_cleanup_errors=True)
        command_read, self._write = os.pipe()
        self._read, events_write = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; the shell moves ours there, whatever their numbers are.
        script = f'exec "$@" 3<&{command_read} 4>&{events_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", path, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(command_read, events_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(events_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, timeout: float = _LIMIT, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result; events that arrive meanwhile are kept."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 2**20) if ready else b""
            if not data:
                raise TimeoutError("Chromium does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def wait_for(self, event: str, session: str, timeout: float = _LIMIT) -> None:
        """Wait until an event of this name has arrived."""
        deadline = time.monotonic() + timeout
        while not any(e.get("method") == event and e.get("sessionId") == session for e in self.events):
            self.events.append(self._next(deadline))

    def open(
        self,
        path: Path,
        *,
        width: int = 1440,
        height: int = 900,
        dark: bool = False,
        still: bool = True,
        slower: float = 1,
        query: str = "",
        scripts: bool = True,
    ) -> Page:
        """Open a file in a tab of this size.

        ``still`` asks for reduced motion, ``slower`` throttles the CPU, ``query`` ends the address; with ``scripts`` False those of
        the page do not run.
        """
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        features += [{"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}]
        page.send("Emulation.setEmulatedMedia", features=features)
        if slower != 1:
            page.send("Emulation.setCPUThrottlingRate", rate=slower)
        if not scripts:
            page.send("Emulation.setScriptExecutionDisabled", value=True)
        page.send("Page.navigate", url=path.absolute().as_uri() + query)
        self.wait_for("Page.loadEventFired", session)
        return page

    def open_lesson(self, path: Path, *, whole: bool = True, **options: Any) -> Page:
        """Open a page of the lesson, and wait until all its figures are drawn; ``whole`` lays out sections out of view, too."""
        page = self.open(path, **options)
        page.run("Lesson.ready")
        if whole:
            page.run("document.head.append(Lesson.el('style', {}, 'main > section { content-visibility: visible }'))")
        return page

    def close(self) -> None:
        """End the process and remove its profile. It is killed: asked to close, it writes the profile first, for many seconds."""
        self._process.kill()
        self._process.wait(60)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser = browser
        self.session = session
        self.target = target

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def resize(self, width: int, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    def type(self, element: str, text: str) -> None:
        """Replace the content of an input, as typing does."""
        self.run(
            f"(() => {{ const e = document.getElementById({json.dumps(element)}); e.focus(); e.value = {json.dumps(text)};"
            "e.dispatchEvent(new Event('input', {bubbles: true})) })()"
        )

    def press(self, key: str) -> None:
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "ArrowDown": 40, "Enter": 13, " ": 32, "Tab": 9}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **more)

    def screenshot(self, path: Path, *, full: bool = True, selector: str | None = None) -> None:
        clip: dict[str, Any] = {}
        if selector is not None:
            box = self.run(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                "return {x: b.x + scrollX, y: b.y + scrollY, width: b.width, height: b.height} })()"
            )
            clip = {"clip": {**box, "scale": 1}}
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full, **clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def problems(self) -> list[str]:
        """Exceptions, errors of the console, and requests that left the page."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            method = event["method"]
            params = event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(f"console: {params['args']}")
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"log: {params['entry']['text']}")
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    found.append(f"request: {url}")
        return found

    def close(self) -> None:
        self.browser.send("Target.closeTarget", targetId=self.target)
