"""A headless Chromium, driven by its debugging protocol through two named pipes."""

import itertools
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_SECONDS = 30.0  # for the page to come to what is waited for
_FLAGS = (
    "--headless",
    "--no-sandbox",  # the only page that it opens is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one tab, closed as a context.

    events: what the tab has told unasked, such as the requests that it has sent.
    """

    def __init__(self, folder):
        """Start it; its profile lies in `folder`, which must be empty."""
        pipes = folder / "in", folder / "out"
        for pipe in pipes:
            os.mkfifo(pipe)
        # The protocol is spoken at the file descriptors 3 and 4.
        command = ["sh", "-c", 'exec "$@" 3<"$0/in" 4>"$0/out"', folder, CHROMIUM]
        self._process = subprocess.Popen(
            [*command, *_FLAGS, f"--user-data-dir={folder / 'profile'}"], stderr=subprocess.DEVNULL
        )
        self._in, self._out = pipes[0].open("wb", buffering=0), pipes[1].open("rb")
        self._numbers, self._session, self.events = itertools.count(1), None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(30)
        self._in.close()
        self._out.close()

    def call(self, method, **params):
        """Return what a method of the protocol returns."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._in.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        message = bytearray()
        while (byte := self._out.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        return json.loads(message)

    def value(self, expression):
        """Return what an expression of JavaScript gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression):
        """Return the first value of an expression that is true."""
        end = time.monotonic() + _SECONDS
        while not (value := self.value(expression)):
            assert time.monotonic() < end, f"{expression}: {self.value('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def type(self, selector, text):
        """Put text in a field, in place of what it holds."""
        self.value(f"{{ const e = document.querySelector({selector!r}); e.focus(); e.select(); }}")
        self.call("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        """Press and release a key. modifiers: 2 is Ctrl."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        # Text makes it more than a shortcut: Enter ends a field.
        text = {"text": "\r"} if key == "Enter" and not modifiers else {}
        what = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, **what, **text)

    def look(self, width, height, scheme):
        """Show the page in a window of that size, in the light or in the dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
