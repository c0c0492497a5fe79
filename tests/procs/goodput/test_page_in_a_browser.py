"""The report's page in a real browser: it draws, its script runs, and it asks nobody for anything."""

import re
import shutil
import subprocess

import pytest

from everstep.goodput.report import write_page
from everstep.testing.simulated_run import showcase

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium to see the page drawn"),
]

PROBE = """
<script>
addEventListener("load", () => {
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const drawn = [...document.querySelectorAll(".lane rect")].filter((r) => r.getBoundingClientRect().width > 0).length;
  document.querySelector("[data-zoom='4']").click();
  const zoomed = document.querySelector(".inner").clientWidth / document.querySelector(".scroller").clientWidth;
  const box = document.querySelector(".loss").getBoundingClientRect();
  document.querySelector(".loss").dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
  const tip = document.querySelector(".tip").textContent;
  const asked = performance.getEntriesByType("resource").length;
  document.title = ["PROBE", wide, drawn, zoomed.toFixed(1), asked, tip].join("|");
});
</script>
"""


def browse(page, profile, *extra):
    """Load the page in a browser of our own; return the document as it stood afterwards."""
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *extra, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_draws_at_any_width_and_asks_nobody(tmp_path, width):
    report = tmp_path / "report.html"
    write_page(showcase().write(tmp_path / "run"), report)
    page = tmp_path / "probed.html"
    page.write_text(report.read_text().replace("</body>", PROBE + "</body>"))
    dom = browse(page, tmp_path / "profile", f"--window-size={width},900", "--dump-dom")
    found = re.search(r"<title>PROBE\|(-?\d+)\|(\d+)\|([\d.]+)\|(\d+)\|(.*?)</title>", dom)
    assert found, dom[:400]
    wide, drawn, zoomed, asked, tip = found.groups()
    assert int(wide) <= 0, "the page scrolls sideways"
    assert int(drawn) > 300
    assert float(zoomed) == 4.0
    assert int(asked) == 0
    assert re.match(r"step \d+ · loss \d", tip)
