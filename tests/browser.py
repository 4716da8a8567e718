"""A headless browser that tests drive by the Chrome DevTools Protocol, over a pipe."""

import base64
import fcntl
import itertools
import json
import os
import pathlib
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = 60.0  # seconds for one answer


class Browser:
  """A running browser with one page. `events` are those that the browser has reported so far."""

  def __init__(self, profile: pathlib.Path):
    reads, self.write_end = os.pipe()
    self.read_end, writes = os.pipe()
    # Copies above 9: the browser reads descriptor 3 and writes descriptor 4.
    their_in, their_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (reads, writes))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    shell = f'exec "$@" 3<&{their_in} 4>&{their_out} {their_in}<&- {their_out}>&-'
    self.process = subprocess.Popen(
      ["bash", "-c", shell, "browser", str(PROGRAM), *flags],
      pass_fds=(their_in, their_out),
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    for fd in (reads, writes, their_in, their_out):
      os.close(fd)
    self.ids, self.buffer, self.events = itertools.count(1), b"", []
    self.session: dict[str, str] = {}
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self.session = {"sessionId": attached["sessionId"]}
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")

  def close(self) -> None:
    os.close(self.write_end)  # the browser ends when nobody can ask any more
    os.close(self.read_end)
    try:
      self.process.wait(10)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()

  def call(self, method: str, **parameters) -> dict:
    """Returns the result of a command of the protocol."""
    number = next(self.ids)
    message = {"id": number, "method": method, "params": parameters} | self.session
    os.write(self.write_end, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._next()
      if answer.get("id") == number:
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]
      self.events.append(answer)

  def _next(self) -> dict:
    deadline = time.monotonic() + PATIENCE
    while b"\0" not in self.buffer:
      ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
      data = os.read(self.read_end, 1 << 20) if ready else b""
      assert data, f"the browser has ended, or gives no answer within {PATIENCE:.0f} seconds"
      self.buffer += data
    text, self.buffer = self.buffer.split(b"\0", 1)
    return json.loads(text)

  def open(self, page: pathlib.Path, width: int, height: int, *, dark: bool) -> None:
    """Loads a page in a window of this size, and forgets earlier events."""
    self.events.clear()
    self.resize(width, height)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.call("Emulation.setEmulatedMedia", features=[scheme])
    self.call("Page.navigate", url=page.as_uri())
    while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
      self.events.append(self._next())

  def resize(self, width: int, height: int) -> None:
    size = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
    self.call("Emulation.setDeviceMetricsOverride", **size)

  def evaluate(self, expression: str):
    """Returns the value of a JavaScript expression, as JSON has it."""
    found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in found, found["exceptionDetails"]
    return found["result"].get("value")

  def hover(self, x: float, y: float) -> None:
    self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

  def screenshot(self) -> bytes:
    """Returns the window as PNG."""
    return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

  def faults(self) -> list[str]:
    """Returns errors and warnings of the console, and requests for other files."""
    found = []
    for event in self.events:
      method, details = event.get("method"), event.get("params", {})
      if method == "Runtime.exceptionThrown":
        found.append(json.dumps(details["exceptionDetails"]))
      elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
        found.append(details["entry"]["text"])
      elif method == "Runtime.consoleAPICalled" and details["type"] in (
        "error",
        "warning",
        "assert",
      ):
        found.append(json.dumps(details["args"]))
      elif method == "Network.requestWillBeSent" and details["type"] != "Document":
        url = details["request"]["url"]
        found += [] if url.startswith("data:") else [f"asks for {url}"]
    return found
