"""The page of `kfp-ddp serve` in Chromium, by the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import websocket

from kfp_ddp.models.evaluation import prediction_rows
from tests import photographs
from tests.integration.serve.test_serve import Server, sealed, server

__all__ = ["sealed", "server"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RESULTS = """new Promise(resolve => {
  const look = () => document.getElementById("clear").hidden ? requestAnimationFrame(look)
    : resolve([...document.querySelectorAll("#results > li")].map(item => ({
        name: item.querySelector("h2").textContent,
        shares: [...item.querySelectorAll("output")].map(share => parseFloat(share.textContent)),
        unsure: item.querySelector(".unsure") !== null,
        shown: item.querySelector("img")?.naturalWidth > 0,
        error: item.querySelector(".error")?.textContent})));
  look();
})"""
GIVE = """(() => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob("%s"), c => c.charCodeAt(0));
  data.items.add(new File([bytes], "%s", {type: "image/jpeg"}));
  document.body.dispatchEvent(%s);
})()"""
PASTE = 'new ClipboardEvent("paste", {clipboardData: data, bubbles: true})'
DROP = 'new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true})'


class Page:
    """A page in a browser, and the addresses that it requested."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.requested: list[str] = []

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while (message := self._next()).get("id") != number:
            pass
        assert "error" not in message, message
        return message["result"]

    def _next(self) -> Any:
        message = json.loads(self._socket.recv())
        if message.get("method") == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])
        return message

    def open(self, url: str) -> None:
        for domain in ("Network", "Page", "DOM"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, code: str) -> Any:
        asked = {"expression": code, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    if not CHROMIUM:
        pytest.skip("there is no chromium")
    words = ["--headless=new", "--no-sandbox", "--remote-debugging-port=0", "about:blank"]
    words += [f"--user-data-dir={tmp_path}/profile", "--remote-allow-origins=*"]
    with subprocess.Popen([CHROMIUM, *words], stderr=subprocess.PIPE, text=True) as browser:
        try:
            lines = iter(browser.stderr or ())
            host = next(line for line in lines if "DevTools listening" in line).split("/")[2]
            tabs = requests.get(f"http://{host}/json/list", timeout=60).json()
            (tab,) = (one for one in tabs if one["type"] == "page")
            address = tab["webSocketDebuggerUrl"]
            with contextlib.closing(websocket.create_connection(address, 60)) as socket:
                yield Page(socket)
        finally:
            browser.kill()


@pytest.mark.slow
def test_given_pictures_are_classified(
    page: Page, server: Server, sealed: Path, trained_dataset: Path, tmp_path: Path
) -> None:
    one, two = sorted(photographs.write(tmp_path / "photos", 2, ["a <b>"]).rglob("*.jpg"))
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(one.read_bytes()[:300])
    evaluated = prediction_rows((sealed / "predictions.csv").read_bytes())
    row = min(evaluated, key=lambda row: float(row["confidence"]))
    least = trained_dataset / "val" / row["path"]
    page.open(server.url)
    page.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", windowsVirtualKeyCode=9)
    assert page.run("document.activeElement.id") == "files"
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    field = page.call("DOM.querySelector", nodeId=root, selector="#files")["nodeId"]
    page.call(
        "DOM.setFileInputFiles", nodeId=field, files=[str(one), str(broken), str(two), str(least)]
    )
    first, second, third, last = page.run(RESULTS)
    assert (last["unsure"], second["unsure"]) == (True, False)
    answer = requests.post(f"{server.url}/predict", one.read_bytes(), timeout=60).json()
    assert first["unsure"] == (answer["sure"] is False)
    content = base64.b64encode(two.read_bytes()).decode()
    for name, event in (("dropped", DROP), ("pasted", PASTE)):
        page.run(GIVE % (content, name, event))
    *_, fourth, fifth = page.run(RESULTS)
    assert [first["name"], third["name"]] == [one.name, two.name]
    assert [fourth, fifth] == [third | {"name": "dropped"}, third | {"name": "pasted"}]
    for result in (first, third):
        assert result["shown"]
        assert result["shares"] == sorted(result["shares"], reverse=True)
        assert sum(result["shares"]) == pytest.approx(100, abs=0.2)
    assert (second["shares"], "cannot read the picture" in second["error"]) == ([], True)
    page.run("document.getElementById('clear').click()")
    assert page.run("document.getElementById('results').children.length") == 0
    assert all(url.startswith((server.url, "blob:", "about:")) for url in page.requested)
