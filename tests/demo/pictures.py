# SPDX-License-Identifier: Apache-2.0
"""`make pictures`: what README shows of `gpulock status` and of the exporter's page, as PNG.

The node is simulated, hooks, exporter and commands are the real ones. It needs `chromium`, or
another browser of its kind, by the variable BROWSER.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.demo.stage import DemoNode
from tests.support.scene import folder
from tests.support.wait import wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
PICTURES: Final = ROOT / "docs/pictures"
ENVIRONMENT: Final = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'exporter'}"}
ADDRESS: Final = "127.0.0.1:19465"
COLUMNS: Final = 160
LOOKED_AT: Final = 270.0  # seconds of history on the page
# what the terminal is told (ECMA-48, SGR), as CSS
STYLES: Final = {
    "1": "font-weight:bold",
    "2": "opacity:.6",
    "31": "color:#f66",
    "32": "color:#6c6",
    "33": "color:#db4",
    "35": "color:#d8f",
    "36": "color:#6cc",
}
TERMINAL: Final = (
    "<body style='margin:0;background:#1b1d22;color:#ddd'>"
    "<pre style='font:15px DejaVu Sans Mono,monospace;line-height:1.35;padding:14px'>{}</pre>"
)


def gpulock(node: DemoNode, *words: str) -> str:
    """Return what a command prints on a terminal with its colours, as on an installed node."""
    program = "from gpulock.cli import main; main()"
    command = [sys.executable, "-c", program, "--config", str(node.config), *words]
    shown = " ".join(f"'{word}'" for word in command)
    done = subprocess.run(
        ["script", "-qec", f"stty cols {COLUMNS} rows 50; {shown}", "/dev/null"],
        env={**ENVIRONMENT, "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.replace("\r", "").replace(f" --config {node.config}", "")


def format_as_html(text: str) -> str:
    """Return what a terminal shows of a text as HTML."""
    parts = re.split(r"\x1b\[([0-9;]*)m", text)
    shown = [html.escape(parts[0])]
    for codes, part in zip(parts[1::2], parts[2::2]):
        style = ";".join(STYLES[code] for code in codes.split(";") if code in STYLES)
        shown.append(f"<span style='{style}'>{html.escape(part)}</span>")
    return TERMINAL.format("".join(shown))


def photograph(address: str, picture: Path, size: str) -> None:
    """Write what a browser shows at an address."""
    browser = os.environ.get("BROWSER", "chromium")
    own = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size}"]
    command: Sequence[str] = [browser, *own, f"--screenshot={picture}", address]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Let jobs work on a node, and photograph it."""
    PICTURES.mkdir(exist_ok=True)
    with folder("pictures") as root:
        node = DemoNode(root, preset="dgx-h200")
        with (root / "exporter.log").open("wb") as log:
            program = "from gpulock_exporter.app.program import main; main()"
            own = ["--config", str(node.config), "--listen", ADDRESS]
            exporter = subprocess.Popen(
                [sys.executable, "-c", program, *own], env=ENVIRONMENT, stdout=log, stderr=log
            )
        try:
            node.submit(4711, "4", name="train")
            node.submit(4712, "1", task=7, name="sweep")
            node.submit(4712, "1", task=8, name="sweep")
            gpulock(node, "quarantine", "6", "--reason", "XID 79: fell off the bus")
            wait_until(lambda: "%" in gpulock(node, "status"), why="the exporter to have a sample")
            time.sleep(LOOKED_AT)
            text = root / "status.html"
            text.write_text(format_as_html("$ gpulock status\n" + gpulock(node, "status")))
            photograph(text.as_uri(), PICTURES / "status.png", "1090,275")
            photograph(f"http://{ADDRESS}/", PICTURES / "page.png", "1240,705")
        finally:
            exporter.terminate()
            exporter.wait()
            node.close()


if __name__ == "__main__":
    main()
